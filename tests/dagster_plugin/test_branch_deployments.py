"""Test production and branch deployments of one code location: each branch works on a clone until it is closed."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from tests.dagster_plugin.test_code_location import run
from tests.dagster_plugin.test_examples import EXAMPLES, load, publish_orders
from tests.lakes import Lakes
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.dagster_plugin import TrinityLakeResource
from trinitylake_ops.dagster_plugin.resources import branch_clone, current_branch
from trinitylake_ops.errors import ExportExistsError, InvalidInputError, LakehouseNotFoundError
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.storage.options import OPTIONS_VARIABLE

EXAMPLE = "branch_deployments/definitions.py"
BRANCH = "feature/Mean of orders"
VARIABLES = ("TRINITYLAKE_BRANCH", "DAGSTER_CLOUD_IS_BRANCH_DEPLOYMENT", "DAGSTER_CLOUD_GIT_BRANCH",
             "DAGSTER_CLOUD_DEPLOYMENT_NAME")  # fmt: skip
#: The change that the branch makes to the code of production.
BEFORE, AFTER = '[("euros", "sum")]', '[("euros", "sum"), ("euros", "mean")]'


@pytest.fixture(autouse=True)
def _without_branch_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def repository_with(folder: Path, *branches: str) -> Path:
    """Return a git repository with these branches."""

    def git(*arguments: str) -> None:
        command = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", *arguments]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)

    folder.mkdir(exist_ok=True)
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    for branch in branches:
        git("branch", branch.replace(" ", "-"))
    return folder


def columns(lake: Lakehouse) -> list[str]:
    return [field.name for field in catalog_at(lake).load_table("reports.revenue").schema().fields]


def write_branch_code(folder: Path) -> Path:
    """Write the code of the branch, which differs from production in one line, and return its path."""
    text = (EXAMPLES / EXAMPLE).read_text()
    assert text.count(BEFORE) == 1
    path = folder / "branch_definitions.py"
    path.write_text(text.replace(BEFORE, AFTER))
    return path


def test_branch_is_read_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert current_branch() is None
    monkeypatch.setenv("DAGSTER_CLOUD_DEPLOYMENT_NAME", "prod")
    monkeypatch.setenv("DAGSTER_CLOUD_IS_BRANCH_DEPLOYMENT", "0")
    assert current_branch() is None
    monkeypatch.setenv("DAGSTER_CLOUD_IS_BRANCH_DEPLOYMENT", "1")
    assert current_branch() == "prod"
    monkeypatch.setenv("DAGSTER_CLOUD_GIT_BRANCH", "fix")
    assert current_branch() == "fix"
    monkeypatch.setenv("TRINITYLAKE_BRANCH", "mine")
    assert current_branch() == "mine"
    monkeypatch.setenv("TRINITYLAKE_BRANCH", "x" * 2000)
    with pytest.raises(InvalidInputError, match="1,000"):
        current_branch()
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DAGSTER_CLOUD_IS_BRANCH_DEPLOYMENT", "1")
    with pytest.raises(InvalidInputError, match="TRINITYLAKE_BRANCH"):
        current_branch()


def test_clone_names_of_branches_are_distinct() -> None:
    names = {branch_clone(branch) for branch in ("a/b", "a-b", "A/b", "ä", "/", "x" * 900)}
    assert len(names) == 6
    assert branch_clone(BRANCH).startswith("branch-feature-mean-of-orders-")
    assert all(len(name) < 100 and name == name.lower() for name in names)


@pytest.mark.local_only("the resource opens the lakehouse by its local path")
def test_first_run_creates_clone_and_later_runs_open_it(
    lakes: Lakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = lakes.local()
    publish_orders(lake)
    clones = f"{tmp_path}/clones"

    def resource(**settings: Any) -> TrinityLakeResource:
        return TrinityLakeResource.for_branch_deployment(lake.root, clones, **settings)

    assert resource().open().root == lake.root
    assert not resource().is_branch
    monkeypatch.setenv("TRINITYLAKE_BRANCH", BRANCH)
    branch = resource(retain_for=timedelta(days=3))
    assert branch.is_branch
    clone = branch.open()
    assert clone.root == f"file://{clones}/{branch_clone(BRANCH)}/"
    assert branch.open_or_create().latest_version() == clone.latest_version() == 0
    (record,) = lake.snapshot().definition.exports
    assert (record.name, (record.retain_until_millis or 0) - record.created_at_millis) == (
        branch_clone(BRANCH), 3 * 24 * 3_600_000,
    )  # fmt: skip
    # If the clone's files were deleted, the run fails and does not create the clone again under the same name.
    for path in [*clone.storage.list()]:
        clone.storage.delete(path.path)
    with pytest.raises(ExportExistsError):
        branch.open()
    recreated = Lakehouse.create(clone.root)
    with pytest.raises(InvalidInputError):
        branch.open()
    assert recreated.latest_version() == 0
    monkeypatch.setenv("TRINITYLAKE_BRANCH", "another")
    with pytest.raises(LakehouseNotFoundError):
        TrinityLakeResource.for_branch_deployment(f"{tmp_path}/missing", clones).open_or_create()
    with pytest.raises(InvalidInputError, match="clones_root"):
        TrinityLakeResource.for_branch_deployment(lake.root, dg.EnvVar("NO_SUCH_VARIABLE"))


@pytest.mark.local_only("the example opens the lakehouse by its local path")
def test_branch_works_on_clone_until_it_is_closed(
    lakes: Lakes, tmp_path: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = lakes.local()
    publish_orders(lake)
    monkeypatch.setenv("LAKE_ROOT", lake.root)
    monkeypatch.setenv("CLONES_ROOT", f"{tmp_path}/clones")
    production = load(monkeypatch, EXAMPLE)
    run(production.defs, instance, "reports")
    version = lake.latest_version()

    monkeypatch.setenv("TRINITYLAKE_BRANCH", "mean")
    branch = load(monkeypatch, str(write_branch_code(tmp_path)))
    assert "closed_branches" not in {sensor.name for sensor in branch.defs.get_repository_def().sensor_defs}
    run(branch.defs, instance, "reports")
    clone = branch.lakehouse.open()
    assert columns(clone) == ["customer", "euros_sum", "euros_mean"]
    assert (columns(lake), lake.latest_version()) == (["customer", "euros_sum"], version + 2)

    monkeypatch.delenv("TRINITYLAKE_BRANCH")
    name = branch_clone("mean")
    lake = Lakehouse.open(lake.root, {"fsync": "false", "allowed_roots": f"file://{tmp_path}/clones/"})
    plan = operations.plan_promotion(lake, name)
    run(production.defs, instance, "promote", name=name, approval={"digest": plan.digest, "approved_by": "Ada"})
    assert columns(lake) == columns(clone)

    sensor = production.defs.resolve_sensor_def("closed_branches")

    def requests() -> list[dg.RunRequest]:
        context = dg.build_sensor_context(
            instance=instance, repository_def=production.defs.get_repository_def(),
            resources={"lakehouse": production.lakehouse},
        )  # fmt: skip
        return list(sensor.evaluate_tick(context).run_requests or [])

    repository = repository_with(tmp_path / "repository", "mean")
    monkeypatch.setenv("REPOSITORY", str(repository))
    operations.plan_clone(lake, f"{tmp_path}/clones/manual").execute()
    assert requests() == []
    subprocess.run(["git", "branch", "-D", "mean"], cwd=repository, check=True, capture_output=True)
    (request,) = requests()
    assert request.run_config == {"name": name}
    run(production.defs, instance, "drop_closed_branch", **request.run_config)
    assert [clone_info.name for clone_info in operations.list_clones(lake)] == ["manual"]
    assert list(clone.storage.list()) == []
    monkeypatch.setenv("REPOSITORY", f"{tmp_path}/no-such-repository")
    with pytest.raises(subprocess.CalledProcessError):
        requests()


@pytest.mark.soak
@pytest.mark.debian_packages
@pytest.mark.timeout(600)
def test_branch_is_promoted_by_deployments_in_separate_processes(radosgw: Any, tmp_path: Path) -> None:
    root, clones = radosgw.fresh_root("production"), radosgw.fresh_root("clones")
    lake = Lakehouse.create(root, radosgw.storage_options)
    publish_orders(lake)
    secret = {"access_key_id": "AWS_ACCESS_KEY_ID", "secret_access_key": "AWS_SECRET_ACCESS_KEY"}
    options = {name: value for name, value in radosgw.storage_options.items() if name not in secret}
    common_environment = {
        **{name: value for name, value in os.environ.items() if name not in VARIABLES},
        **{variable: radosgw.storage_options[name] for name, variable in secret.items()},
        "LAKE_ROOT": root, "CLONES_ROOT": clones,
        OPTIONS_VARIABLE: ",".join(f"{name}={value}" for name, value in options.items()),
    }  # fmt: skip

    def job(deployment: str, file: Path, name: str, config: str = "{}", **environment: str) -> None:
        home, config_file = tmp_path / deployment, tmp_path / "config.yaml"
        home.mkdir(exist_ok=True)
        config_file.write_text(config)  # JSON is YAML
        command = [sys.executable, "-m", "dagster", "job", "execute", "-f", str(file), "-j", name]
        completed = subprocess.run(
            [*command, "-c", str(config_file)],
            env={**common_environment, **environment, "DAGSTER_HOME": str(home)},
            capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert completed.returncode == 0, completed.stderr

    production, branch = EXAMPLES / EXAMPLE, write_branch_code(tmp_path)
    dagster_plus = {"DAGSTER_CLOUD_IS_BRANCH_DEPLOYMENT": "1", "DAGSTER_CLOUD_GIT_BRANCH": BRANCH}
    job("production", production, "reports")
    job("branch", branch, "reports", **dagster_plus)
    name = branch_clone(BRANCH)
    clone = Lakehouse.open(f"{clones}{name}/", radosgw.storage_options)
    assert columns(clone) == ["customer", "euros_sum", "euros_mean"]
    assert columns(lake) == ["customer", "euros_sum"]
    job("branch", branch, "verify", **dagster_plus)
    allowed_roots = TrinityLakeResource.for_branch_deployment(root, clones).allowed_roots
    lake = Lakehouse.open(root, {**radosgw.storage_options, "allowed_roots": allowed_roots[0]})
    digest = operations.plan_promotion(lake, name).digest
    approval = f'{{"name": "{name}", "approval": {{"digest": "{digest}", "approved_by": "Ada"}}}}'
    job("production", production, "promote", approval)
    assert columns(lake) == ["customer", "euros_sum", "euros_mean"]
    job("production", production, "drop_closed_branch", f'{{"name": "{name}"}}')
    assert operations.list_clones(lake) == []
    assert list(clone.storage.list()) == []
    assert operations.verify(lake, deep=True).is_clean
