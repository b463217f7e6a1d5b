"""The UI shows runs of the demo at their jobs: asked of Dagster as its pages ask, by GraphQL."""

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
from trinitylake_ops.demo.play import Demo
from trinitylake_ops.storage.options import StorageOptions

RUNS = """
query($job: PipelineSelector!) { pipelineOrError(params: $job) { ... on Pipeline { runs(limit: 9) { runId } } } }
"""


def test_a_run_of_the_demo_stands_at_its_job(lakes: Lakes) -> None:
    lake = lakes.local()
    definitions = dg.Definitions(jobs=build_jobs(), resources={"lakehouse": TrinityLakeResource(root=lake.root)})
    # Where `make ui` finds the definitions, with their file as the name of the code location.
    loaded = LoadableTargetOrigin(python_file=str(REPOSITORY / "definitions.py"), working_directory=str(REPOSITORY))
    target = InProcessWorkspaceLoadTarget(InProcessCodeLocationOrigin(loaded, location_name="definitions.py"))
    with dg.instance_for_test() as instance, WorkspaceProcessContext(instance, target) as workspace:
        console = Console(file=io.StringIO())
        demo = Demo(definitions, instance, lake.root, StorageOptions({}), "", console, months=[])
        demo.run("look", "expire_plan", outcome=lambda _: "done")
        (run,) = instance.get_runs()
        job = {
            "repositoryLocationName": "definitions.py",
            "repositoryName": "__repository__",
            "pipelineName": "expire_plan",
        }
        answer: Any = execute_dagster_graphql(workspace.create_request_context(), RUNS, {"job": job})
    assert not answer.errors
    assert answer.data["pipelineOrError"]["runs"] == [{"runId": run.run_id}]
