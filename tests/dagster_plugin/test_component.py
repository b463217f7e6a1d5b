"""Test that Dagster's dg finds, scaffolds and checks the component in a separate project."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import pytest
import yaml

from tests.credentials.canaries import SECRET_ACCESS_KEY, leaks
from trinitylake_ops.dagster_plugin import TrinityLakeMaintenanceComponent
from trinitylake_ops.dagster_plugin.checks import CheckLimits
from trinitylake_ops.dagster_plugin.component import ChecksModel
from trinitylake_ops.operations import Budget

REPOSITORY = Path(__file__).parents[2]
TYPE = "trinitylake_ops.dagster_plugin.component.TrinityLakeMaintenanceComponent"


INVALID_ATTRIBUTES = [
    ("name: null", "name= of LakehouseSettings is required"),
    ("name: Sales!", "'Sales!' is not a valid lakehouse name"),
    ("root: s3://bucket/../lake", "'root' is invalid"),
    ("storage_options: {color: red}", "unknown option 'color'"),
    ("allowed_roots: [s3://KEY:secret@bucket/lake]", "one of 'allowed_roots' is invalid"),
    (f"storage_options: {{secret_access_key: {SECRET_ACCESS_KEY}}}", "'secret_access_key' is a credential"),
    (f"storage_options: {{s3.secret_access_key: {SECRET_ACCESS_KEY}}}", "'s3.secret_access_key' is a credential"),
    ("storage_options: {gs.region: here}", "unknown option 'gs.region'"),
    (f"secret_options_from_env: {{access_key_id: {SECRET_ACCESS_KEY}}}", "environment variable"),
    ("tables: [orders]", "'orders' is not a table name; use NAMESPACE.TABLE"),
    ("timezone: Atlantis", "Atlantis"),
    ("crons: {sweep: 0 0 * * *}", "unknown operation 'sweep'"),
    ("crons: {verify: often}", "often"),
    ("observe_cron: often", "often"),
    ("blackouts: [{start: '25:00', end: '06:00', reason: x}]", "'25:00' is not a time of day"),
    ("blackouts: [{start: '22:00', end: '06:00', reason: x, days: [noday]}]", "'noday' is not a weekday"),
    ("limits: {max_files: -1, max_bytes: 1, min_age_days: 1}", "max_files is -1"),
    ("budget: {max_requests: 0}", "max_requests"),
    ("check_limits: {verify_seconds: 0}", "max_seconds"),
    ("check_limits: {orphan_age_days: .inf}", "orphan_age_days is inf"),
    ("check_limits: {verified_exports: -1}", "verified_exports is -1"),
    ("check_limits: {min_leaf_fill: .nan}", "min_leaf_fill is nan"),
    ("check_limits: {min_leaf_fill: 25}", "min_leaf_fill is 25"),
    ("reclaimable_seconds: .nan", "reclaimable_seconds is nan"),
    ("timezone: /etc/localtime", "unknown time zone '/etc/localtime'"),
    ("timezone: Europe", "unknown time zone 'Europe'"),
    ("operations: [vacuum]", "'vacuum' is neither an operation nor a group"),
    ("checks: [tidy]", "unknown check 'tidy'"),
    ("crons: {purge: 0 4 * * *}", "cannot schedule 'purge'"),
    ("blackouts: [{start: '01:00', end: '02:00', reason: load, days: []}]", "has no days"),
    ("export_target: s3://key:secret-value@backups/lake", "export_target is invalid"),
    ("tables: [a b.c]", "namespace name 'a b' contains a space"),
]


@dataclass
class Project:
    """A new project, and an environment with the package installed."""

    folder: Path
    environment: dict[str, str]

    @property
    def defs(self) -> Path:
        return self.folder / "src" / "my_lakes" / "defs"

    def dg(self, *arguments: str) -> str:
        """Return the output of dg, and assert that it succeeds."""
        completed = self.run("dg", *arguments)
        assert completed.returncode == 0, completed.stdout + completed.stderr
        return completed.stdout + completed.stderr

    def run(self, *command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        program = Path(sys.executable).with_name(command[0])
        return subprocess.run(
            [program, *command[1:]],
            cwd=cwd or self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("dg")
    home, project, packages = folder / "home", folder / "project", folder / "packages"
    home.mkdir()
    (home / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    shutil.copytree(REPOSITORY / "examples" / "yaml_project", project)
    shutil.rmtree(project / "src" / "my_lakes" / "defs" / "sales")
    install(folder / "source", packages)
    path = os.pathsep.join(map(str, (packages, project / "src")))
    environment = {**os.environ, "HOME": str(home), "DAGSTER_HOME": str(home), "PYTHONPATH": path, "COLUMNS": "400"}
    return Project(project, environment)


def install(source: Path, target: Path) -> None:
    """Install a copy of the package with its entry points, because a build writes next to its sources."""
    shutil.copytree(REPOSITORY / "trinitylake_ops", source / "trinitylake_ops")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(REPOSITORY / name, source)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*command, "--target", target, source], check=True, timeout=120)


@pytest.mark.soak
def test_dg_lists_scaffolds_and_checks_component(project: Project) -> None:
    assert TYPE in project.dg("list", "components")
    project.dg("scaffold", "defs", TYPE, "sales")
    file = project.defs / "sales" / "defs.yaml"
    example = yaml.safe_load(file.read_text())
    assert (example["type"], example["attributes"]["name"]) == (TYPE, "sales")
    assert "$" not in file.read_text()
    file.write_text(file.read_text().replace("min_age_days: 7", "min_age_days: -7"))
    completed = project.run("dg", "check", "defs")
    assert completed.returncode != 0
    (message,) = {line for line in (completed.stdout + completed.stderr).splitlines() if "min_age_days" in line}
    assert message.endswith(
        f"DagsterInvalidDefinitionError: {file.parent}: min_age_days is -7; it must be between 0 and 1,000,000"
    )


@pytest.mark.soak
def test_dg_and_dagster_accept_scaffolded_project(project: Project) -> None:
    project.dg("scaffold", "defs", TYPE, "sales")
    project.dg("check", "yaml")
    project.dg("check", "defs")
    completed = project.run("dagster", "definitions", "validate", "-m", "my_lakes.definitions")
    assert completed.returncode == 0, completed.stderr


@pytest.mark.soak
def test_dg_accepts_definitions_py(project: Project) -> None:
    completed = project.run("dg", "check", "defs", cwd=REPOSITORY)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "All definitions loaded successfully." in completed.stdout + completed.stderr


def test_options_of_scaffolded_example_are_valid() -> None:
    """Commented lines are parsed as well."""
    text = (REPOSITORY / "trinitylake_ops" / "dagster_plugin" / "component_example.yaml").read_text()
    text = text.replace("$type", TYPE).replace("$name", "sales")
    uncommented = re.sub(r"^  # (?=[a-z_]+:|  )", "  ", text, flags=re.MULTILINE)
    attributes = yaml.safe_load(uncommented)["attributes"]
    fields = set(TrinityLakeMaintenanceComponent.model_fields)
    assert fields - set(attributes) == {
        "isolation",
        "engine",
        "reclaimable_seconds",
        "on_commit",
        "location_name",
    }
    component = TrinityLakeMaintenanceComponent.resolve_from_yaml(yaml.safe_dump(attributes))
    settings = component.settings()
    assert settings.names.lakehouse_key == dg.AssetKey(["sales", "lakehouse"])
    assert settings.published_by == [dg.AssetKey(["publish", "sales"])]
    assert settings.lakehouse.allowed_roots == ["s3://other-bucket/warehouse"]
    assert settings.budget == Budget(max_seconds=3600, requests_per_second=100)
    assert settings.observe_cron == TrinityLakeMaintenanceComponent.model_fields["observe_cron"].default
    assert (settings.export_target, str(settings.blackouts[0])) == (
        "s3://my-backups/lake",
        "22:00 to 06:00: the nightly load",
    )


def test_check_limits_are_equal_in_code_and_yaml() -> None:
    assert ChecksModel().limits() == CheckLimits()


@pytest.mark.parametrize(
    ("attributes", "message"), INVALID_ATTRIBUTES, ids=[text.split(":")[0] for text, _ in INVALID_ATTRIBUTES]
)
def test_invalid_value_is_rejected_with_clear_message(attributes: str, message: str) -> None:
    fields = {"name": "lake", "root": "memory://m/", **yaml.safe_load(attributes)}
    component = TrinityLakeMaintenanceComponent.resolve_from_yaml(yaml.safe_dump(fields))
    with pytest.raises(dg.DagsterInvalidDefinitionError) as raised:
        component.build_defs(dg.ComponentTree.for_test().load_context)
    text = str(raised.value)
    assert message in text
    assert "\n" not in text
    assert raised.value.__cause__ is None and raised.value.__context__ is None
    assert leaks(text) == []
