"""Tests of the server's Helm chart: its objects match the schemas of Kubernetes, and its containers work."""

from __future__ import annotations

import json
import re
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import kubernetes_validate
import pytest
import yaml

from tests.charts import (
    CHART,
    HELM,
    REPOSITORY,
    TIMEOUT_SECONDS,
    Container,
    RenderError,
    check_is_restricted,
    of_kind,
    pods,
    render,
)
from tests.lakes import check_lake
from tests.server.test_access_control import READER, entry
from trinitylake_ops import Lakehouse
from trinitylake_ops.cli.app import trinitylake

LAKEHOUSES = {"sales": {"root": "s3://bucket/sales", "storage_options": {"region": "eu-central-1"}}}
ROLE = {"eks.amazonaws.com/role-arn": "arn:aws:iam::123456789012:role/lake"}
FULL: dict[str, Any] = {
    "lakehouses": {**LAKEHOUSES, "hr": {"root": "gs://bucket/hr", "allowed_roots": ["gs://other/"]}},
    "tokens": {"secretName": "lake-tokens"},
    "issuers": [{"name": "sso", "issuer": "https://login.example.com"}],
    "tls": {"secretName": "lake-tls"},
    "credentials": {"secretName": "lake-credentials"},
    "env": [{"name": "OTEL_SERVICE_NAME", "value": "lake"}],
    "extraArgs": ["--traces"],
    "imagePullSecrets": [{"name": "registry"}],
    "serviceAccount": {"annotations": ROLE, "labels": {"azure.workload.identity/use": "true"}},
    "podLabels": {"team": "data"},
    "podAnnotations": {"note": "kept"},
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"key": "data", "operator": "Exists"}],
    "maintenance": {
        "enabled": True,
        "serviceAccount": {"annotations": ROLE},
        "credentials": {"secretName": "lake-maint"},
    },
}
SMALL: dict[str, Any] = {"lakehouses": LAKEHOUSES, "tokens": {"secretName": "lake-tokens"}}
LOG = {"schedule": "@daily", "args": ["log"]}


def volume_at(path: Path) -> dict[str, Any]:
    """Return chart values for a volume that all pods mount at a path."""
    return {
        "volumes": [{"name": "lakes", "persistentVolumeClaim": {"claimName": "lakes"}}],
        "volumeMounts": [{"name": "lakes", "mountPath": str(path)}],
    }


VOLUME = volume_at(Path("/lakes"))
#: The oldest version that the chart supports, and the newest version with a schema.
KUBERNETES = ("1.27", kubernetes_validate.latest_version())


@pytest.fixture(scope="module")
def full() -> list[dict[str, Any]]:
    return render(FULL)


def test_chart_version_equals_package_version() -> None:
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    metadata = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (metadata["version"], metadata["appVersion"]) == (version, version)
    assert metadata["kubeVersion"].startswith(f">={KUBERNETES[0]}.")


def test_rendered_objects_match_kubernetes_schemas(full: list[dict[str, Any]]) -> None:
    kinds = {item["kind"]: item for item in full}
    assert sorted(kinds) == [
        "ConfigMap", "CronJob", "Deployment", "NetworkPolicy", "PodDisruptionBudget", "Service", "ServiceAccount",
    ]  # fmt: skip
    for version in KUBERNETES:
        for item in kinds.values():
            kubernetes_validate.validate(item, version, strict=True)
    wrong = {**kinds["Service"], "spec": {**kinds["Service"]["spec"], "selectors": {}}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES[0], strict=True)


def test_pods_are_restricted_and_have_limits(full: list[dict[str, Any]]) -> None:
    accounts = {}
    for name, pod in pods(full):
        check_is_restricted(name, pod)
        assert pod["automountServiceAccountToken"] is False
        (container,) = pod["containers"]
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]
        accounts[name] = pod["serviceAccountName"]
    assert len(accounts) == 1 + 2 * 5
    assert {*accounts.values()} == {item["metadata"]["name"] for item in of_kind(full, "ServiceAccount")}
    assert accounts["lake-trinitylake"] == "lake-trinitylake"
    assert accounts["lake-trinitylake-hr-purge"] == "lake-trinitylake-maintenance"


def test_network_policies_select_existing_pods(full: list[dict[str, Any]]) -> None:
    templates = [
        item["spec"].get("jobTemplate", item)["spec"]["template"]["metadata"]["labels"]
        for item in [*of_kind(full, "Deployment"), *of_kind(full, "CronJob")]
    ]
    selectors = [item["spec"]["podSelector"]["matchLabels"] for item in of_kind(full, "NetworkPolicy")]
    for labels in templates:
        assert sum(selector.items() <= labels.items() for selector in selectors) == 1
    server, maintenance = (item["spec"] for item in of_kind(full, "NetworkPolicy"))
    assert server["ingress"] == [{"from": [{"podSelector": {}}], "ports": [{"port": "http", "protocol": "TCP"}]}]
    assert maintenance["ingress"] == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tokens": {"secretName": "tokens"}}, "lakehouses: configure at least one"),
        ({"lakehouses": LAKEHOUSES}, "tokens.secretName or issuers"),
        ({**SMALL, "replica": 3}, "replica"),
        ({**SMALL, "lakehouses": {"a b": {"root": "/lake"}}}, "a b"),
        ({**SMALL, "lakehouses": {"a": {"root": "s3://b/l", "storage_options": {"secret_access_key": "x"}}}}, "secret"),
        ({**SMALL, "maintenance": {"enabled": True, "jobs": {"a" * 40: LOG}}}, "more than 52"),
        ({**SMALL, "lakehouses": {"a": {"root": "/lakes/a"}}}, "no volume is mounted"),
        ({**SMALL, "lakehouses": {"a": {"root": "file:///lakes/a"}}}, "no volume is mounted"),
        ({**SMALL, "lakehouses": {"a": {"root": "/lakes-b/a"}}, **VOLUME}, "no volume is mounted"),
        ({**SMALL, "lakehouses": {"a": {"root": "/lakes/../tmp/a"}}, **VOLUME}, "no volume is mounted"),
        ({**SMALL, "lakehouses": {"a": {"root": "s3://b/l", "allowed_roots": ["/old"]}}}, "no volume is mounted"),
        ({**SMALL, "lakehouses": {"a": {"root": "memory://a"}}, **VOLUME}, "memory of one process"),
    ],
)  # fmt: skip
def test_invalid_values_are_rejected(values: Mapping[str, Any], message: str) -> None:
    with pytest.raises(RenderError, match=message):
        render(values)


@pytest.mark.parametrize("root", ["/lakes/sales", "file:///lakes/sales", "/lakes"])
def test_local_root_is_on_volume_of_all_pods(root: str) -> None:
    objects = render({**SMALL, **VOLUME, "lakehouses": {"sales": {"root": root}}, "maintenance": {"enabled": True}})
    for item in objects:
        kubernetes_validate.validate(item, KUBERNETES[-1], strict=True)
    for name, pod in pods(objects):
        check_is_restricted(name, pod)
        assert VOLUME["volumes"][0] in pod["volumes"]
        assert VOLUME["volumeMounts"][0] in pod["containers"][0]["volumeMounts"]


def test_maintenance_is_off_by_default_and_jobs_can_be_omitted() -> None:
    assert of_kind(render(SMALL), "CronJob") == []
    jobs = {"trim": None, "orphans": {"schedule": "10 4 * * 0", "args": ["orphans", "--yes"], "suspend": True}}
    cron_jobs = of_kind(render({**SMALL, "maintenance": {"enabled": True, "jobs": jobs}}), "CronJob")
    suspended = {item["metadata"]["name"].rpartition("-")[2]: item["spec"]["suspend"] for item in cron_jobs}
    assert suspended == {"expire": False, "orphans": True, "purge": False, "verify": False}


def test_jobs_run_existing_commands_and_options(full: list[dict[str, Any]]) -> None:
    called = set()
    for item in of_kind(full, "CronJob"):
        ((container,),) = (pod["containers"] for _, pod in pods([item]))
        with trinitylake.make_context("trinitylake", list(container["args"])) as context:
            name, command, arguments = trinitylake.resolve_command(context, [*context._protected_args, *context.args])
            assert command is not None
            command.make_context(name, arguments, parent=context)
        called.add((name, item["spec"]["schedule"]))
    assert {name for name, _ in called} == {"trim", "expire", "purge", "orphans", "verify"}


def test_server_responds_to_probes_and_authenticated_requests(tmp_path: Path) -> None:
    lake = Lakehouse.create(str(tmp_path / "lake"))
    objects = render({**SMALL, "lakehouses": {"sales": {"root": lake.root}}, **volume_at(tmp_path)})
    ((_, pod),) = pods(objects)
    tokens = yaml.safe_dump({"tokens": [entry(READER, "reader", scope="read")]})
    files = {item["metadata"]["name"]: item["data"] for item in of_kind(objects, "ConfigMap")}
    container = Container(pod, tmp_path / "pod", {**files, "lake-tokens": {"tokens.yaml": tokens}})
    with container.running(host="127.0.0.1", port="0") as process:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while "\n" not in container.output():
            assert process.poll() is None and time.monotonic() < deadline, container.output()
            time.sleep(0.02)
        startup = json.loads(container.output().splitlines()[0])
        assert startup["authentication"] == "tokens"
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container.spec[kind]["httpGet"]
            assert (probe["port"], probe["scheme"]) == ("http", "HTTP")
            with urlopen(f"{startup['address']}{probe['path']}", timeout=60) as response:
                assert response.status == 200
        request = Request(f"{startup['address']}/v1/config?warehouse=sales")
        with pytest.raises(HTTPError, match="401"):
            urlopen(request, timeout=60)
        request.add_header("Authorization", f"Bearer {READER}")
        with urlopen(request, timeout=60) as response:
            assert json.load(response)["overrides"]["prefix"]
        process.terminate()
        assert process.wait(TIMEOUT_SECONDS) == 0


@pytest.mark.soak
def test_jobs_run_successfully(tmp_path: Path) -> None:
    """Run the container of each job as a process, in the order of the schedules."""
    lake = Lakehouse.create(str(tmp_path / "lake"), {"fsync": "false"})
    for number in range(4):
        with lake.transaction() as transaction:
            transaction.create_namespace(f"ns{number}")
    values = {
        **SMALL,
        **volume_at(tmp_path),
        "lakehouses": {"sales": {"root": lake.root}},
        "maintenance": {"enabled": True},
    }
    succeeded = []
    for item in sorted(of_kind(render(values), "CronJob"), key=lambda item: item["spec"]["schedule"].split()[1]):
        ((name, pod),) = pods([item])
        container = Container(pod, tmp_path / name, {})
        assert container.run() == 0, (name, container.output())
        succeeded.append(name.rpartition("-")[2])
    assert succeeded == ["trim", "expire", "purge", "orphans", "verify"]
    check_lake(lake)


def test_documentation_snippets_are_valid() -> None:
    """The values can be rendered, and the commands refer to existing files and targets of the Dockerfile."""
    page = (REPOSITORY / "docs" / "deploy" / "kubernetes.md").read_text()
    snippets = re.findall(r"^```(\w+)\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    values = [yaml.safe_load(text) for language, text in snippets if language == "yaml"]
    assert [len(of_kind(render(item), "CronJob")) for item in values] == [0, 5]
    commands = "".join(text for language, text in snippets if language == "sh")
    assert {language for language, _ in snippets} == {"sh", "yaml"}
    files = re.findall(r"deploy/[\w./-]+", page)
    assert len(files) > 10
    assert [name for name in files if not (REPOSITORY / name.rstrip(".")).exists()] == []
    targets = re.findall(r"^FROM \S+ AS (\w+)", (REPOSITORY / "deploy" / "Dockerfile").read_text(), flags=re.MULTILINE)
    assert {*re.findall(r"--target (\w+)", commands)} == {*targets} - {"base"}
    iam_files = {path.name for path in (REPOSITORY / "deploy" / "iam").iterdir()} - {"README.md"}
    assert {name for name in iam_files if name not in page} == {"gcs-writer-notes-condition.yaml"}


def test_values_for_dagster_chart_restrict_pods() -> None:
    """Check the values only: tests/e2e/test_dagster_chart.py renders them, which requires Dagster's chart."""
    values = yaml.safe_load((HELM / "dagster-values.yaml").read_text())
    (deployment,) = values["dagster-user-deployments"]["deployments"]
    for component in (values["dagsterWebserver"], values["dagsterDaemon"], deployment):
        assert component["image"] == deployment["image"]
        spec = {"containers": [{"securityContext": component["securityContext"]}], "volumes": component["volumes"]}
        check_is_restricted("dagster", {**spec, "securityContext": component["podSecurityContext"]})
    assert "envSecrets" not in values["dagsterWebserver"].keys() | values["dagsterDaemon"].keys()
