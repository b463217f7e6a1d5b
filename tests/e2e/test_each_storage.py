"""Use each storage like a user: tables, exports to other storages, commands, Dagster, Spark and the demo.

`make test` uses the two fastest storages, and the soak tests use all storages and all pairs of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from tests.cli.forked import run
from tests.cli.test_processes import assert_one_line
from tests.cli.test_processes import run as run_program
from tests.credentials.test_command_line import CALLS, CLONE
from tests.e2e.storage_locations import (
    ALL_KINDS,
    DONE,
    KINDS,
    MORE_ROWS,
    StorageLocation,
    as_json,
    location_on,
    rows,
    use_tables,
    with_variables,
)
from tests.e2e.test_demo import FinishedDemo
from tests.operations.aging import Aging
from tests.operations.changes import append_rows, create, expire
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.dagster_plugin import (
    LakehouseSettings,
    SecretVariables,
    StorageSettings,
    TrinityLakeResource,
    build_trinitylake_definitions,
)
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.storage import open_storage
from trinitylake_ops.storage.options import is_secret

pytestmark = [pytest.mark.debian_packages, pytest.mark.timeout(900)]

REPOSITORY = Path(__file__).parents[2]
FAST_KINDS = KINDS[:2]


def kinds_with_soak(*always: str) -> list[Any]:
    """Return all kinds as parameters. Kinds other than ``always`` run only in soak tests."""
    return [kind if kind in always else pytest.param(kind, marks=pytest.mark.soak) for kind in KINDS]


PAIRS = [
    pytest.param(kind, other_kind, marks=[] if {kind, other_kind} == {*FAST_KINDS} else pytest.mark.soak)
    for kind in ALL_KINDS
    for other_kind in ALL_KINDS
]


@pytest.fixture
def server_for(request: pytest.FixtureRequest) -> Any:
    """Return the function that starts the server of a kind."""
    return request.getfixturevalue


@pytest.mark.parametrize(("kind", "other_kind"), PAIRS)
def test_exports_work_between_any_two_storages(kind: str, other_kind: str, server_for: Any) -> None:
    source, target = location_on(server_for(kind)), location_on(server_for(other_kind), "target")
    options = {**source.named_options, **target.named_options}
    with with_variables(*(location for location in (source, target) if location.scheme == "hdfs")):
        lake = Lakehouse.create(source.root, options, order=4)
        use_tables(lake)
        for level in ("partial", "full"):
            root = f"{target.root}{level}/"
            operations.plan_export(lake, level, level, target=root, definitions=level == "partial").execute()
            assert rows(lake, level) == [1, 2, 3, 4]
            assert operations.verify_export(lake, level, deep=True).is_clean
            copy = Lakehouse.open(root, options)
            assert rows(copy) == [1, 2, 3, 4]
            catalog_at(copy).load_table("ns.t").append(MORE_ROWS)
            assert rows(copy) == [1, 2, 3, 4, 4]
            assert operations.verify(copy).findings == ()
        with lake.transaction() as txn:
            txn.drop_table("ns", "t")
        operations.plan_restore(lake, "full").execute()
        assert rows(lake) == [1, 2, 3, 4]
        server_for(kind).delete_all(source.root)
        assert rows(Lakehouse.open(f"{target.root}full/", target.named_options)) == [1, 2, 3, 4, 4], (
            "the export must not depend on its source"
        )
        server_for(other_kind).delete_all(target.root)


@pytest.mark.parametrize(("kind", "other_kind"), [pair for pair in PAIRS if pair.values[0] != pair.values[1]])
def test_table_root_can_be_on_another_storage(kind: str, other_kind: str, server_for: Any) -> None:
    source, target = location_on(server_for(kind)), location_on(server_for(other_kind), "tables")
    options = {**source.named_options, **target.named_options}
    with with_variables(*(location for location in (source, target) if location.scheme == "hdfs")):
        lake = Lakehouse.create(source.root, options, table_root=target.root)
        use_tables(lake)
        assert catalog_at(lake).load_table("ns.t").location().startswith(target.root)
        assert operations.plan_relocation(lake).is_empty
        copy_root = f"{source.root.removesuffix('/')}-copy/"
        operations.plan_export(lake, "copy", "full", target=copy_root).execute()
        server_for(other_kind).delete_all(target.root)
        assert rows(Lakehouse.open(copy_root, source.named_options)) == [1, 2, 3, 4]
        server_for(kind).delete_all(source.root)


def create_populated_lakehouse(location: StorageLocation) -> None:
    """Create a lakehouse on which all commands can run."""
    lake = Lakehouse.create(location.root, location.named_options)
    create(lake, "ns")
    append_rows(lake)
    metadata_location = lake.snapshot().table("ns", "t").format_properties["metadata_location"]
    lake.storage.create("copy.metadata.json", lake.storage.read(metadata_location))
    expire(lake, "0")
    lake.close()


@pytest.mark.soak
@pytest.mark.parametrize("kind", [*KINDS, "valkey_server"])
def test_all_commands_run(kind: str, server_for: Any) -> None:
    location = location_on(server_for(kind))
    with with_variables(location):
        create_populated_lakehouse(location)
    # HDFS cannot be used in a process forked after its first use
    command = run_program if location.scheme == "hdfs" else run
    clone = f"{location.root.removesuffix('/')}-clone/"
    for name, arguments in CALLS.items():
        result = command(*(clone if argument == CLONE else argument for argument in arguments), **location.environment)
        expected = {"init": 3, "resolve-commit": 1}.get(name, 0)
        assert result.code == expected, (name, result)
        assert not any(
            value in result.out + result.err for name, value in location.secret_options.items() if is_secret(name)
        )
    server_for(kind).delete_all(location.root)


@pytest.mark.parametrize("kind", kinds_with_soak(*FAST_KINDS))
def test_wrong_root_or_credentials_are_reported_in_one_line(kind: str, server_for: Any) -> None:
    location = location_on(server_for(kind))
    command = run_program if location.scheme == "hdfs" else run
    assert_one_line(command("log", **location.environment), 4, f"there is no lakehouse at {location.root}")
    assert_one_line(
        command("log", **{**location.environment, "TRINITYLAKE_ROOT": location.missing_root}), 5, location.missing_root
    )
    forbidden_root = {"TRINITYLAKE_ROOT": location.root.replace("/tests/", "/")} if location.scheme == "hdfs" else {}
    assert_one_line(
        command("init", **{**location.environment, **location.invalid_variables, **forbidden_root}),
        5,
        location.expected_error,
    )
    unknown_option = {**location.environment, "TRINITYLAKE_STORAGE_OPTIONS": f"{location.scheme}.color=red"}
    assert_one_line(command("log", **unknown_option), 2, "unknown storage option 'color'")


@pytest.mark.parametrize("kind", kinds_with_soak("redis_server"))
def test_dagster_jobs_export_to_another_storage(kind: str, server_for: Any) -> None:
    location = location_on(server_for(kind))
    target = location_on(server_for("azurite" if kind == "redis_server" else "redis_server"), "target")
    variables = {
        f"{storage.scheme}.{name}": f"SECRET_{storage.scheme}_{name}"
        for storage in (location, target)
        for name in storage.secret_options
        if is_secret(name)
    }
    public_options = {
        name: value for name, value in {**location.named_options, **target.named_options}.items() if not is_secret(name)
    }
    with with_variables(location, target) as patch, dg.instance_for_test() as instance:
        for name, variable in variables.items():
            patch.setenv(variable, {**location.named_options, **target.named_options}[name])
        resource = TrinityLakeResource(
            root=location.root,
            storage_options=StorageSettings(**public_options),
            secret_options_from_env=SecretVariables(**variables),
        )
        use_tables(resource.open_or_create())
        defs = build_trinitylake_definitions(LakehouseSettings(name="", lakehouse=resource))
        for job, config in (("export", {"name": "target", "target": f"{target.root}full"}), ("verify", {})):
            definition = defs.resolve_job_def(job)
            result = definition.execute_in_process(instance=instance, run_config=config, raise_on_error=False)
            assert result.success, instance.all_logs(result.run_id)
        output = f"{resource!r} {[instance.all_logs(run.run_id) for run in instance.get_runs()]}"
        assert not any(os.environ[variable] in output for variable in variables.values() if variable)
    assert rows(Lakehouse.open(f"{target.root}full", target.named_options)) == [1, 2, 3, 4]
    server_for(kind).delete_all(location.root)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_expired_space_is_reclaimed(kind: str, server_for: Any) -> None:
    location = location_on(server_for(kind))
    with with_variables(location):
        aging = Aging.on(open_storage(location.root, location.named_options))
        append_rows(aging.lake)
        for _ in range(3):
            with catalog_at(aging.lake) as catalog:
                catalog.load_table("ns.t").overwrite(MORE_ROWS)
        aging.later()
        expired = aging.expire()
        aging.later()
        purged = aging.purge()
        assert (purged.files, purged.is_complete) == (expired.files, True)
        aging.lake.storage.create("0101/orphan.binpb", b"x")
        assert operations.verify(aging.lake, deep=True).findings == ()
        server_for(kind).delete_all(location.root)


@pytest.mark.soak
@pytest.mark.parametrize("timing", ["BEFORE", "AFTER"])
def test_spark_tasks_reach_each_storage(timing: str, server_for: Any, tmp_path: Path) -> None:
    """Credentials that are only in the driver's environment are accepted, and appear in no plan, log or output."""
    locations = [location_on(server_for(kind)) for kind in KINDS]
    process = subprocess.run(
        [sys.executable, "-m", "tests.e2e.storage_locations", timing, str(tmp_path)],
        input=as_json(locations),
        capture_output=True,
        text=True,
        timeout=800,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert DONE in process.stdout
    log = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"SparkListenerTaskEnd" in log
    secrets = {
        value
        for location in locations
        for name, value in location.secret_options.items()
        if is_secret(name) and value != "anonymous"
    }
    assert len(secrets) == 3
    assert not any(value in process.stdout + process.stderr or value.encode() in log for value in secrets)


@pytest.mark.soak
@pytest.mark.parametrize("kind", [*KINDS, "valkey_server"])
def test_demo_runs(kind: str, server_for: Any, tmp_path: Path) -> None:
    location = location_on(server_for(kind))
    demo = FinishedDemo(tmp_path, months=1, environment=location.environment)
    demo.run_program()
    assert demo.exit_code == 0, demo.output + demo.errors
    assert "27,004 flights in the lakehouse, 27,004 in the source" in demo.output
    assert f"at {location.root}" in demo.output
    with with_variables(location):
        assert operations.verify(Lakehouse.open(location.root, location.named_options), deep=True).findings == ()
    server_for(kind).delete_all(location.root)
