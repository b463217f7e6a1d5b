"""Run jobs and steps as pods: dagster-k8s with its own launcher and executor, on a fake Kubernetes cluster.

The launcher requests a container for each run worker, and the executor one for each step. In these tests, containers
are processes that have only the environment variables of the pod. Not tested: images, nodes, volumes, memory limits
and eviction.
"""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import PythonFileTarget
from dagster_graphql.test.utils import execute_dagster_graphql

from tests.dagster_plugin.incident_project import LOAD, NAMES, ROOT, SOURCE
from tests.lakes import check_lake
from tests.servers.kubernetes_api import Cluster, serving
from trinitylake_ops import Lakehouse
from trinitylake_ops.iceberg.catalog import catalog_at

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1_800)]

REPOSITORY = Path(__file__).parents[2]
DEFINITIONS = Path(__file__).with_name("pods_definitions.py")
IMAGE = "registry.example.com/lake:1"
SECRET = "lake-secrets"
TIMEOUT_SECONDS = 900
LAUNCH = """
mutation($run: ExecutionParams!) {
  launchRun(executionParams: $run) { __typename ... on LaunchRunSuccess { run { runId } }
    ... on PythonError { message } ... on RunConfigValidationInvalid { errors { message } } }
}
"""


class Deployment:
    """An instance whose runs are pods of a cluster, with the code location in a separate process."""

    def __init__(self, instance: dg.DagsterInstance, workspace: WorkspaceProcessContext, cluster: Cluster):
        self.instance = instance
        self.workspace = workspace
        self.cluster = cluster

    def run(self, job: str, config: Mapping[str, Any] | None = None) -> dg.DagsterRun:
        """Launch a job like the launchpad, and wait until its run has ended."""
        selector = {"repositoryLocationName": "lake", "repositoryName": "__repository__", "jobName": job}
        response: Any = execute_dagster_graphql(
            self.workspace.create_request_context(),
            LAUNCH,
            {"run": {"selector": selector, "runConfigData": config or {}}},
        )
        assert not response.errors, response.errors
        assert response.data["launchRun"]["__typename"] == "LaunchRunSuccess", response.data
        run_id = response.data["launchRun"]["run"]["runId"]
        deadline_s = time.monotonic() + TIMEOUT_SECONDS
        while True:
            run = self.instance.get_run_by_id(run_id)
            assert run is not None
            if run.is_finished:
                return run
            assert time.monotonic() < deadline_s, self.cluster.log()
            time.sleep(1)

    def must_run(self, job: str, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Run a job that must succeed. Return the metadata of its last step."""
        run = self.run(job, config)
        assert run.is_success, (self.cluster.rejected, self.cluster.log()[-20_000:])
        metadata: dict[str, Any] = {}
        for record in self.instance.get_records_for_run(run.run_id, of_type=dg.DagsterEventType.STEP_OUTPUT).records:
            event = record.event_log_entry.dagster_event
            assert event is not None
            metadata = {name: value.value for name, value in event.step_output_data.metadata.items()}
        return metadata


def settings(home: Path, kubeconfig: Path) -> str:
    """Return the ``dagster.yaml`` for Kubernetes from docs/deploy/dagster.md, with the fake cluster's address."""
    page = (REPOSITORY / "docs" / "deploy" / "dagster.md").read_text()
    (snippet,) = (text for text in re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL) if "K8s" in text)
    config_file = yaml.safe_load(snippet)
    config_file["run_launcher"]["config"] |= {
        "dagster_home": str(home),
        "load_incluster_config": False,
        "kubeconfig_file": str(kubeconfig),
        "env_vars": [f"KUBECONFIG={kubeconfig}"],
    }
    coordinator = {"module": "dagster._core.run_coordinator", "class": "DefaultRunCoordinator"}
    return yaml.safe_dump({**config_file, "run_coordinator": coordinator, "telemetry": {"enabled": False}})


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lakehouse]:
    folder = tmp_path_factory.mktemp("pods-lake")
    lake = Lakehouse.create(str(folder / "shop"), {"fsync": "false"})
    yield lake
    check_lake(lake)


@pytest.fixture(scope="module")
def deployment(shop: Lakehouse, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder, home = tmp_path_factory.mktemp("cluster"), tmp_path_factory.mktemp("home")
    root = shop.root.removeprefix("file://").rstrip("/")
    secrets = {SECRET: {ROOT: base64.b64encode(root.encode()).decode()}}
    config_maps: dict[str, dict[str, str]] = {"dagster-instance": {}}
    cluster = Cluster(folder, secrets, config_maps, REPOSITORY)
    with serving(cluster) as url, pytest.MonkeyPatch.context() as patch:
        kubeconfig = cluster.kubeconfig(url)
        config_maps["dagster-instance"]["dagster.yaml"] = settings(home, kubeconfig)
        (home / "dagster.yaml").write_text(settings(home, kubeconfig))
        # The process of the code location loads the definitions, so it needs the variables.
        for name, value in {"KUBECONFIG": str(kubeconfig), ROOT: root, "PYTHONPATH": str(REPOSITORY)}.items():
            patch.setenv(name, value)
        target = PythonFileTarget(
            python_file=str(DEFINITIONS), attribute=None, working_directory=str(REPOSITORY), location_name="lake"
        )
        with (
            dg.DagsterInstance.from_config(str(home)) as instance,
            WorkspaceProcessContext(instance, target) as workspace,
        ):
            yield Deployment(instance, workspace, cluster)


def publish(deployment: Deployment, shop: Lakehouse, amounts: str) -> int:
    Path(shop.root.removeprefix("file://").rstrip("/")).with_name(SOURCE).write_text(amounts)
    deployment.must_run(LOAD)
    return shop.latest_version()


def test_pods_publish_and_roll_back_tables(deployment: Deployment, shop: Lakehouse) -> None:
    good_version = publish(deployment, shop, "1\n2\n3")
    bad_version = publish(deployment, shop, "4\n-5")
    assert (good_version, bad_version) == (1, 2)
    plan = deployment.must_run(NAMES.of("rollback"), {"to": {"version": good_version}})
    assert (plan["rows_coming_back"], plan["rows_going_away"]) == (3, 2)
    config = {"to": {"version": good_version}, "approval": {"digest": plan["digest"], "approved_by": "Ada"}}
    proof = deployment.must_run(NAMES.of("rollback"), config)
    assert (proof["rows_before"], proof["rows_after"], proof["checks_failed"]) == (2, 3, 0)
    rows = catalog_at(shop).load_table("sales.orders").scan().to_arrow()["amount"].to_pylist()
    assert rows == [1, 2, 3]
    assert next(shop.history()).approved_by == "Ada"


def test_purge_uses_pool_in_pods(deployment: Deployment, shop: Lakehouse) -> None:
    deployment.instance.event_log_storage.set_concurrency_slots(NAMES.pool, 1)
    plan = deployment.must_run(NAMES.of("purge"))
    deployment.must_run(NAMES.of("purge"), {"approval": {"digest": plan["digest"], "approved_by": "Ada"}})
    run, _plan = deployment.instance.get_runs(dg.RunsFilter(job_name=NAMES.of("purge")))
    assert run.run_op_concurrency is not None
    assert run.run_op_concurrency.all_pools == {NAMES.pool}
    info = deployment.instance.event_log_storage.get_concurrency_info(NAMES.pool)
    assert (info.slot_count, info.active_slot_count, info.pending_step_count) == (1, 0, 0)


def test_pods_have_settings_and_no_secrets(deployment: Deployment, shop: Lakehouse) -> None:
    """Check the pods of all other tests. Must be the last test."""
    pods, root = deployment.cluster.pods, shop.root.removeprefix("file://").rstrip("/")
    kinds = {pod.body["metadata"]["labels"]["app.kubernetes.io/component"] for pod in pods.values()}
    assert (deployment.cluster.rejected, kinds) == ([], {"run_worker", "step_worker"})
    for name, pod in pods.items():
        spec, container = pod.body["spec"]["template"]["spec"], pod.container
        assert (pod.namespace, spec["serviceAccountName"], container["image"]) == ("lake", "dagster", IMAGE), name
        assert container["envFrom"] == [{"secretRef": {"name": SECRET}}], name
        assert container["resources"]["requests"] == {"cpu": "500m", "memory": "512Mi"}, name
        is_step = pod.body["metadata"]["labels"]["app.kubernetes.io/component"] == "step_worker"
        assert container["resources"]["limits"] == {"memory": "1Gi" if is_step else "2Gi"}, name
        assert pod.environment[ROOT] == root, "the Secret must set the root"
        assert root not in str(pod.body), "only the Secret may contain the root"
        assert pod.body["spec"]["backoffLimit"] == 0, "Kubernetes must not retry pods"
