"""Test the values for Dagster's Helm chart: render them with Helm, validate them with schemas, and run processes.

The chart is not part of this project: ``DAGSTER_CHART`` names its archive or folder. Without this variable, the tests
are deselected, but a release requires them (docs/release.md).
"""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import time
from pathlib import Path
from typing import Any

import dagster as dg
import jsonschema
import kubernetes_validate
import pytest
import referencing
import yaml
from referencing.jsonschema import DRAFT7

from tests.charts import HELM, REPOSITORY, TIMEOUT_SECONDS, Container, check_is_restricted, of_kind, pods, render
from tests.servers.daemons import free_port
from tests.servers.postgres import Postgres, postgres

CHART = os.environ.get("DAGSTER_CHART", "")
pytestmark = [
    pytest.mark.timeout(1_800),
    pytest.mark.soak,
    pytest.mark.debian_packages,
    pytest.mark.dagster_chart,
]
SUBCHART = "dagster-user-deployments"
PASSWORD = "test-password"
POSTGRES_SECRET = "dagster-postgresql-secret"
IMAGE_ENVIRONMENT = {"DAGSTER_HOME": "/dagster"}


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    chart_values: dict[str, Any] = yaml.safe_load((HELM / "dagster-values.yaml").read_text())
    chart_values["postgresql"] |= {"postgresqlHost": "127.0.0.1", "service": {"port": free_port()}}
    return chart_values


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart in a folder, with its schemas renamed because they refer to URLs that are not reachable."""
    folder = tmp_path_factory.mktemp("chart") / "dagster"
    if Path(CHART).is_dir():
        shutil.copytree(CHART, folder)
    else:
        with tarfile.open(CHART) as archive:
            archive.extractall(folder.parent)
    for schema in folder.rglob("values.schema.json"):
        schema.rename(schema.with_name("schema.renamed"))
    return folder


@pytest.fixture(scope="module")
def objects(chart: Path, values: dict[str, Any]) -> list[dict[str, Any]]:
    return render(values, chart, "dagster")


def merge_values(defaults: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Merge values into the values of a chart like Helm does."""
    nested = {
        key: merge_values(defaults[key], value)
        for key, value in overrides.items()
        if _are_dicts(defaults.get(key), value)
    }
    return {**defaults, **overrides, **nested}


def _are_dicts(default: Any, override: Any) -> bool:
    return isinstance(default, dict) and isinstance(override, dict)


def test_values_match_schema_of_chart(chart: Path, values: dict[str, Any]) -> None:
    schemas = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    latest = f"v{kubernetes_validate.latest_version()}-local"
    definitions = json.loads((schemas / latest / "_definitions.json").read_text())["$defs"]
    document = DRAFT7.create_resource({"definitions": definitions, "$defs": definitions})
    registry: Any = referencing.Registry(retrieve=lambda _: document)  # type: ignore[call-arg]
    for folder, overrides in ((chart, values), (chart / "charts" / SUBCHART, values[SUBCHART])):
        schema = json.loads((folder / "schema.renamed").read_text())
        all_values = merge_values(yaml.safe_load((folder / "values.yaml").read_text()), overrides)
        errors = jsonschema.Draft7Validator(schema, registry=registry).iter_errors(all_values)
        assert [f"{list(error.path)}: {error.message[:200]}" for error in errors] == []


def test_rendered_objects_are_valid_and_restricted(objects: list[dict[str, Any]]) -> None:
    for item in objects:
        kubernetes_validate.validate(item, kubernetes_validate.latest_version(), strict=True)
    for name, pod in pods(objects):
        check_is_restricted(name, pod)
        assert all("memory" in container["resources"]["limits"] for container in pod["containers"]), name
    accounts = {
        item["metadata"]["name"]: item["metadata"].get("annotations") for item in of_kind(objects, "ServiceAccount")
    }
    assert {name for name, annotations in accounts.items() if annotations} == {
        "dagster-dagster-user-deployments-user-deployments"
    }
    with_credentials = {
        name for name, pod in pods(objects) for container in pod["containers"] if "lake-credentials" in str(container)
    }
    assert with_credentials == {"dagster-dagster-user-deployments-lake"}


def files_of(objects: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Return the contents of ConfigMaps and of the manually created Secrets."""
    config_maps = {item["metadata"]["name"]: item.get("data") or {} for item in of_kind(objects, "ConfigMap")}
    return {
        **config_maps,
        POSTGRES_SECRET: {"postgresql-password": PASSWORD},
        "lake-credentials": {"AWS_ACCESS_KEY_ID": "k"},
    }


def test_pool_exists_before_first_run(
    objects: list[dict[str, Any]], values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the release's job as a process with the configured Postgres."""
    settings = values["postgresql"]
    port = settings["service"]["port"]
    database = Postgres(port, settings["postgresqlDatabase"], settings["postgresqlUsername"], PASSWORD)
    ((_, pod),) = pods([item for item in of_kind(objects, "Job") if item["metadata"]["name"] == "lake-pools"])
    container = Container(pod, tmp_path / "pod", files_of(objects), IMAGE_ENVIRONMENT)
    with postgres(database, ["postgres", "-p", str(port)], tmp_path / "postgres.log"):
        assert container.run() == 0, container.output()
        monkeypatch.setenv("DAGSTER_PG_PASSWORD", PASSWORD)
        with dg.DagsterInstance.from_config(container.environment["DAGSTER_HOME"]) as instance:
            limits = instance.event_log_storage.get_pool_limits()
            assert [(pool.name, pool.limit) for pool in limits] == [("trinitylake_deletes", 1)]
            pools = instance.get_concurrency_config().pool_config
            assert (pools.default_pool_limit, str(pools.pool_granularity)) == (1, "PoolGranularity.RUN")


def test_code_location_passes_probes(objects: list[dict[str, Any]], tmp_path: Path) -> None:
    ((_, pod),) = pods(
        [item for item in of_kind(objects, "Deployment") if "user-deployments" in item["metadata"]["name"]]
    )
    pod["containers"][0]["volumeMounts"].sort(key=lambda mount: mount["mountPath"])
    container = Container(pod, tmp_path / "pod", files_of(objects), IMAGE_ENVIRONMENT)
    container.environment["TRINITYLAKE_ROOT"] = str(tmp_path / "lake")
    arguments = container.spec["args"]
    arguments[:] = [
        str(REPOSITORY / "definitions.py") if argument == "/app/definitions.py" else argument for argument in arguments
    ]
    port = str(free_port())
    arguments[:] = [{"0.0.0.0": "127.0.0.1", "4000": port}.get(argument, argument) for argument in arguments]
    with container.running() as process:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            command = [
                port if argument == "4000" else argument for argument in container.spec[probe]["exec"]["command"]
            ]
            deadline = time.monotonic() + 5 * TIMEOUT_SECONDS
            while container.run(command):
                assert process.poll() is None and time.monotonic() < deadline, container.output()
