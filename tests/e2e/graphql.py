"""A webserver of Dagster as its pages use it: queries and mutations of GraphQL."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

PATIENCE_SECONDS = 240
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
    """Ask a webserver, and wait for the runs that it shows."""

    @property
    @abstractmethod
    def url(self) -> str:
        """The operator's webserver."""

    @property
    def viewer_url(self) -> str:
        """The read-only webserver, where there is one."""
        return self.url

    @abstractmethod
    def wait_until(self, is_done: Callable[[], bool], what: str) -> None:
        """Wait for something; fails with the logs when it does not come."""

    def graphql(self, query: str, *, viewer: bool = False, **variables: Any) -> dict[str, Any]:
        """Return the data of an answer; fails for errors."""
        answer = self.answer(query, viewer=viewer, **variables)
        assert "errors" not in answer, answer["errors"]
        data: dict[str, Any] = answer["data"]
        return data

    def answer(self, query: str, *, viewer: bool = False, **variables: Any) -> dict[str, Any]:
        """Return an answer as it is."""
        request = urllib.request.Request(
            f"{self.viewer_url if viewer else self.url}/graphql",
            data=json.dumps({"query": query, "variables": variables}).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as response:
                answer: dict[str, Any] = json.load(response)
        except urllib.error.HTTPError as error:
            answer = json.load(error)
        return answer

    def runs(self, **filters: Any) -> list[dict[str, Any]]:
        """Return runs, the newest first: runId, jobName, status, tags."""
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
        """Wait until a run has one of the statuses, by default has ended; returns it."""
        self.wait_until(lambda: self.status(run_id) in (statuses or FINISHED), f"run {run_id}")
        return self.status(run_id)

    def events(self, run_id: str) -> list[dict[str, Any]]:
        """Return the events of a run as the run's page shows them."""
        data = self.graphql(_EVENTS, id=run_id)["logsForRun"]
        events: list[dict[str, Any]] = data["events"]
        return events

    def messages(self, run_id: str) -> list[str]:
        """Return what the events of a run say, with the errors."""
        return [
            " ".join(filter(None, (event["message"], (event.get("error") or {}).get("message"))))
            for event in self.events(run_id)
        ]
