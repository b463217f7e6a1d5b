"""All that users do, on each storage: tables, exports to any other storage, commands, Dagster, Spark and the demo.

``make test`` has the two storages that cost least. The soak has all of them, and each with each.
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
from tests.e2e.everywhere import (
    ALL_KINDS,
    DONE,
    KINDS,
    MORE,
    Place,
    as_json,
    place_on,
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
CHEAP = KINDS[:2]


def but_in_soak(*now: str) -> list[Any]:
    """Return all kinds, for parameters: these in a test run, the others in the soak."""
    return [kind if kind in now else pytest.param(kind, marks=pytest.mark.soak) for kind in KINDS]


PAIRS = [
    pytest.param(one, other, marks=[] if {one, other} == {*CHEAP} else pytest.mark.soak)
    for one in ALL_KINDS
    for other in ALL_KINDS
]


@pytest.fixture
def server_of(request: pytest.FixtureRequest) -> Any:
    """Return the server of a kind."""
    return request.getfixturevalue


@pytest.mark.parametrize(("kind", "other"), PAIRS)
def test_tables_and_exports_go_from_any_storage_to_any_other(kind: str, other: str, server_of: Any) -> None:
    source, target = place_on(server_of(kind)), place_on(server_of(other), "away")
    options = {**source.named, **target.named}
    with with_variables(*(place for place in (source, target) if place.scheme == "hdfs")):
        lake = Lakehouse.create(source.root, options, order=4)
        use_tables(lake)
        for level in ("partial", "full"):
            root = f"{target.root}{level}/"
            operations.plan_export(lake, level, level, target=root, definitions=level == "partial").execute()
            assert rows(lake, level) == [1, 2, 3, 4]
            assert operations.verify_export(lake, level, deep=True).is_clean
            copy = Lakehouse.open(root, options)
            assert rows(copy) == [1, 2, 3, 4]
            catalog_at(copy).load_table("ns.t").append(MORE)
            assert rows(copy) == [1, 2, 3, 4, 4]
            assert operations.verify(copy).findings == ()
        with lake.transaction() as txn:
            txn.drop_table("ns", "t")
        operations.plan_restore(lake, "full").execute()
        assert rows(lake) == [1, 2, 3, 4]
        server_of(kind).delete_all(source.root)
        assert rows(Lakehouse.open(f"{target.root}full/", target.named)) == [1, 2, 3, 4, 4], "it needs no source"
        server_of(other).delete_all(target.root)


@pytest.mark.parametrize(("kind", "other"), [pair for pair in PAIRS if pair.values[0] != pair.values[1]])
def test_files_of_tables_live_on_another_storage(kind: str, other: str, server_of: Any) -> None:
    source, target = place_on(server_of(kind)), place_on(server_of(other), "tables")
    options = {**source.named, **target.named}
    with with_variables(*(place for place in (source, target) if place.scheme == "hdfs")):
        lake = Lakehouse.create(source.root, options, table_root=target.root)
        use_tables(lake)
        assert catalog_at(lake).load_table("ns.t").location().startswith(target.root)
        assert operations.plan_relocation(lake).is_empty
        back = f"{source.root.removesuffix('/')}-back/"
        operations.plan_export(lake, "back", "full", target=back).execute()
        server_of(other).delete_all(target.root)
        assert rows(Lakehouse.open(back, source.named)) == [1, 2, 3, 4]
        server_of(kind).delete_all(source.root)


def filled(place: Place) -> None:
    """Make the lakehouse that all commands can work on."""
    lake = Lakehouse.create(place.root, place.named)
    create(lake, "ns")
    append_rows(lake)
    metadata_location = lake.snapshot().table("ns", "t").format_properties["metadata_location"]
    lake.storage.create("copy.metadata.json", lake.storage.read(metadata_location))
    expire(lake, "0")
    lake.close()


@pytest.mark.soak
@pytest.mark.parametrize("kind", [*KINDS, "valkey_server"])
def test_every_command(kind: str, server_of: Any) -> None:
    place = place_on(server_of(kind))
    with with_variables(place):
        filled(place)
    # what was forked after HDFS was used cannot use it
    command = run_program if place.scheme == "hdfs" else run
    clone = f"{place.root.removesuffix('/')}-clone/"
    for name, arguments in CALLS.items():
        result = command(*(clone if one == CLONE else one for one in arguments), **place.environment)
        expected = {"init": 3, "resolve-commit": 1}.get(name, 0)
        assert result.code == expected, (name, result)
        assert not any(value in result.out + result.err for name, value in place.hidden.items() if is_secret(name))
    server_of(kind).delete_all(place.root)


@pytest.mark.parametrize("kind", but_in_soak(*CHEAP))
def test_a_wrong_root_and_wrong_credentials_are_one_line(kind: str, server_of: Any) -> None:
    place = place_on(server_of(kind))
    command = run_program if place.scheme == "hdfs" else run
    assert_one_line(command("log", **place.environment), 4, f"there is no lakehouse at {place.root}")
    assert_one_line(command("log", **{**place.environment, "TRINITYLAKE_ROOT": place.missing}), 5, place.missing)
    refused = {"TRINITYLAKE_ROOT": place.root.replace("/tests/", "/")} if place.scheme == "hdfs" else {}
    assert_one_line(command("init", **{**place.environment, **place.wrong, **refused}), 5, place.refusal)
    mistyped = {**place.environment, "TRINITYLAKE_STORAGE_OPTIONS": f"{place.scheme}.color=red"}
    assert_one_line(command("log", **mistyped), 2, "unknown storage option 'color'")


@pytest.mark.parametrize("kind", but_in_soak("redis_server"))
def test_dagster_works_there_and_exports_elsewhere(kind: str, server_of: Any) -> None:
    place = place_on(server_of(kind))
    target = place_on(server_of("azurite" if kind == "redis_server" else "redis_server"), "away")
    variables = {
        f"{one.scheme}.{name}": f"SECRET_{one.scheme}_{name}"
        for one in (place, target)
        for name in one.hidden
        if is_secret(name)
    }
    shown = {name: value for name, value in {**place.named, **target.named}.items() if not is_secret(name)}
    with with_variables(place, target) as patch, dg.instance_for_test() as instance:
        for name, variable in variables.items():
            patch.setenv(variable, {**place.named, **target.named}[name])
        resource = TrinityLakeResource(
            root=place.root,
            storage_options=StorageSettings(**shown),
            secret_options_from_env=SecretVariables(**variables),
        )
        use_tables(resource.open_or_create())
        defs = build_trinitylake_definitions(LakehouseSettings(name="", lakehouse=resource))
        for job, config in (("export", {"name": "away", "target": f"{target.root}full"}), ("verify", {})):
            definition = defs.resolve_job_def(job)
            result = definition.execute_in_process(instance=instance, run_config=config, raise_on_error=False)
            assert result.success, instance.all_logs(result.run_id)
        seen = f"{resource!r} {[instance.all_logs(run.run_id) for run in instance.get_runs()]}"
        assert not any(os.environ[variable] in seen for variable in variables.values() if variable)
    assert rows(Lakehouse.open(f"{target.root}full", target.named)) == [1, 2, 3, 4]
    server_of(kind).delete_all(place.root)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_space_is_freed(kind: str, server_of: Any) -> None:
    place = place_on(server_of(kind))
    with with_variables(place):
        aging = Aging.on(open_storage(place.root, place.named))
        append_rows(aging.lake)
        for _ in range(3):
            with catalog_at(aging.lake) as catalog:
                catalog.load_table("ns.t").overwrite(MORE)
        aging.later()
        expired = aging.expire()
        aging.later()
        purged = aging.purge()
        assert (purged.files, purged.is_complete) == (expired.files, True)
        aging.lake.storage.create("0101/left-over.binpb", b"x")
        assert operations.verify(aging.lake, deep=True).findings == ()
        server_of(kind).delete_all(place.root)


@pytest.mark.soak
@pytest.mark.parametrize("when", ["BEFORE", "AFTER"])
def test_tasks_of_spark_reach_each_storage(when: str, server_of: Any, tmp_path: Path) -> None:
    """Also with what only the driver's environment has, which no plan, log or output shows."""
    places = [place_on(server_of(kind)) for kind in KINDS]
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.everywhere", when, str(tmp_path)],
        input=as_json(places),
        capture_output=True,
        text=True,
        timeout=800,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert DONE in done.stdout
    logged = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"SparkListenerTaskEnd" in logged
    secrets = {
        value for place in places for name, value in place.hidden.items() if is_secret(name) and value != "anonymous"
    }
    assert len(secrets) == 3
    assert not any(value in done.stdout + done.stderr or value.encode() in logged for value in secrets)


@pytest.mark.soak
@pytest.mark.parametrize("kind", [*KINDS, "valkey_server"])
def test_the_demo(kind: str, server_of: Any, tmp_path: Path) -> None:
    place = place_on(server_of(kind))
    demo = FinishedDemo(tmp_path, months=1, environment=place.environment)
    demo.run_program()
    assert demo.exit_code == 0, demo.output + demo.errors
    assert "27,004 flights in the lakehouse, 27,004 in the source" in demo.output
    assert f"at {place.root}" in demo.output
    with with_variables(place):
        assert operations.verify(Lakehouse.open(place.root, place.named), deep=True).findings == ()
    server_of(kind).delete_all(place.root)
