"""Test with the UI's GraphQL queries that its home page and job pages list the runs of the demo."""

from __future__ import annotations

import io
from typing import Any

import dagster as dg
from dagster._core.remote_origin import InProcessCodeLocationOrigin
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import InProcessWorkspaceLoadTarget
from dagster_graphql.test.utils import execute_dagster_graphql
from rich.console import Console

from tests.dagster_plugin.test_launchpad import REPOSITORY
from tests.lakes import Lakes
from trinitylake_ops.dagster_plugin import TrinityLakeResource, build_jobs
from trinitylake_ops.demo.walkthrough import Demo
from trinitylake_ops.storage.options import StorageOptions

# The home page has a row for each job with runs, and omits runs with an unknown origin.
HOME_PAGE_QUERY = """
query($filter: RunsFilter!) { runsOrError(filter: $filter) { ... on Runs { results {
  id pipelineName status startTime repositoryOrigin { repositoryName repositoryLocationName }
} } } }
"""
JOB_PAGE_QUERY = """
query($job: PipelineSelector!) { pipelineOrError(params: $job) { ... on Pipeline { runs(limit: 9) { runId } } } }
"""
REPOSITORY_ORIGIN = {"repositoryName": "__repository__", "repositoryLocationName": "definitions.py"}


def test_home_page_and_job_pages_list_demo_runs(lakes: Lakes) -> None:
    lake = lakes.local()
    definitions = dg.Definitions(
        jobs=build_jobs(), resources={"lakehouse": TrinityLakeResource(root=lake.root)}, executor=dg.in_process_executor
    )
    # The location from which `make ui` loads the definitions, with their file as the name of the code location.
    target_origin = LoadableTargetOrigin(
        python_file=str(REPOSITORY / "definitions.py"), working_directory=str(REPOSITORY)
    )
    target = InProcessWorkspaceLoadTarget(InProcessCodeLocationOrigin(target_origin, location_name="definitions.py"))
    with dg.instance_for_test() as instance, WorkspaceProcessContext(instance, target) as workspace:
        console = Console(file=io.StringIO())
        demo = Demo(definitions, "definitions.py", instance, lake.root, StorageOptions({}), "", console, months=[])
        demo.run("expire", "expire", outcome=lambda _: "done")
        demo.run("roll back", "rollback", config={"to": {"version": 1}}, must_fail=True, outcome=lambda _: "done")
        failed, succeeded = instance.get_runs()

        def query_ui(query: str, **variables: Any) -> Any:
            response: Any = execute_dagster_graphql(workspace.create_request_context(), query, variables)
            assert not response.errors
            return next(iter(response.data.values()))

        listed_runs = query_ui(HOME_PAGE_QUERY, filter={"statuses": ["SUCCESS", "FAILURE"], "updatedAfter": 0})[
            "results"
        ]
        rows = [(run["id"], run["pipelineName"], run["status"], run["repositoryOrigin"]) for run in listed_runs]
        assert rows == [
            (failed.run_id, "rollback", "FAILURE", REPOSITORY_ORIGIN),
            (succeeded.run_id, "expire", "SUCCESS", REPOSITORY_ORIGIN),
        ]
        assert all(run["startTime"] for run in listed_runs)
        for run in (failed, succeeded):
            job_runs = query_ui(JOB_PAGE_QUERY, job={**REPOSITORY_ORIGIN, "pipelineName": run.job_name})
            assert job_runs == {"runs": [{"runId": run.run_id}]}
