"""Client of a Dagster webserver that sends GraphQL requests like its pages do."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

TIMEOUT_SECONDS = 240
FINISHED = ("SUCCESS", "FAILURE", "CANCELED")

METADATA = """metadataEntries { label description __typename
  ... on TextMetadataEntry { text } ... on IntMetadataEntry { intValue } ... on FloatMetadataEntry { floatValue }
  ... on MarkdownMetadataEntry { mdStr } ... on JsonMetadataEntry { jsonString } ... on UrlMetadataEntry { url }
  ... on BoolMetadataEntry { boolValue } }"""
_ERROR = "error { message stack causes { message stack } }"
_EVENTS = f"""query ($id: ID!) {{ logsForRun(runId: $id) {{ ... on EventConnection {{ events {{
  __typename
  ... on MessageEvent {{ message stepKey level timestamp }}
  ... on StepEvent {{ stepKey }}
  ... on ExecutionStepOutputEvent {{ {METADATA} }}
  ... on MaterializationEvent {{ {METADATA} }}
  ... on ExecutionStepFailureEvent {{ {_ERROR} failureMetadata {{ {METADATA} }} }}
  ... on RunFailureEvent {{ {_ERROR} }}
  ... on EngineEvent {{ {_ERROR} }}
}} }} }} }}"""


class Webserver(ABC):
    """Client of a webserver that can wait for runs."""

    @property
    @abstractmethod
    def url(self) -> str:
        """The URL of the operator's webserver."""

    @property
    def viewer_url(self) -> str:
        """The URL of the read-only webserver, by default that of the operator's webserver."""
        return self.url

    @abstractmethod
    def wait_until(self, is_done: Callable[[], bool], condition: str) -> None:
        """Wait until a condition is satisfied; fails with the logs on timeout."""

    def graphql(self, query: str, *, viewer: bool = False, **variables: Any) -> dict[str, Any]:
        """Return the data of a response; fails if it contains errors."""
        body = self.post(query, viewer=viewer, **variables)
        assert "errors" not in body, body["errors"]
        data: dict[str, Any] = body["data"]
        return data

    def post(self, query: str, *, viewer: bool = False, **variables: Any) -> dict[str, Any]:
        """Return the complete response."""
        request = urllib.request.Request(
            f"{self.viewer_url if viewer else self.url}/graphql",
            data=json.dumps({"query": query, "variables": variables}).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
                body: dict[str, Any] = json.load(response)
        except urllib.error.HTTPError as error:
            body = json.load(error)
        return body

    def runs(self, **filters: Any) -> list[dict[str, Any]]:
        """Return runs, newest first, with their ID, job, status, configuration and tags."""
        data = self.graphql(
            """query ($filter: RunsFilter) { runsOrError(filter: $filter) { ... on Runs { results {
                 runId jobName status runConfigYaml tags { key value } } } } }""",
            filter=filters,
        )["runsOrError"]["results"]
        return [{**run, "tags": {tag["key"]: tag["value"] for tag in run["tags"]}} for run in data]

    def status(self, run_id: str) -> str:
        """Return the status of a run, such as QUEUED."""
        data = self.graphql("query ($id: ID!) { runOrError(runId: $id) { ... on Run { status } } }", id=run_id)
        status: str = data["runOrError"]["status"]
        return status

    def wait_for_run(self, run_id: str, *statuses: str) -> str:
        """Wait until a run has one of the statuses, by default until it has ended. Return the status."""
        self.wait_until(lambda: self.status(run_id) in (statuses or FINISHED), f"run {run_id}")
        return self.status(run_id)

    def events(self, run_id: str) -> list[dict[str, Any]]:
        """Return the events of a run like the run's page shows them."""
        data = self.graphql(_EVENTS, id=run_id)["logsForRun"]
        events: list[dict[str, Any]] = data["events"]
        return events

    def messages(self, run_id: str) -> list[str]:
        """Return the messages of a run's events, including errors."""
        return [
            " ".join(filter(None, (event["message"], (event.get("error") or {}).get("message"))))
            for event in self.events(run_id)
        ]
