"""Tests of extras: what the core can do without any extra, and the error for each missing extra."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest
from packaging.utils import canonicalize_name

from tests.conftest import SUMMARY_PROPERTY
from tests.environments import (
    PROJECT,
    SEPARATE_EXTRAS,
    Environment,
    declared_requirements,
    dependency_groups,
    distributions_of,
    extra_modules_of,
    installed_with,
    make_environment,
    packages_distributions,
    run_without,
)
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import InvalidInputError, MissingExtraError
from trinitylake_ops.extras import EXTRAS, needs
from trinitylake_ops.iceberg import catalog_at

#: Commands that a core installation runs on local disk, in order.
COMMANDS = (
    ["init"],
    ["create-namespace", "sales"],
    ["log"],
    ["ls"],
    ["ls", "sales", "--json"],
    ["verify"],
    ["verify", "--deep", "--html", "verify.html"],
    ["export", "kept"],
    ["rollback", "1", "--yes"],
    ["repair-hint", "--check-only"],
    ["log", "--json"],
)
CLI = "from trinitylake_ops.cli import main\nmain()"
MAX_CORE_BYTES = 250_000_000


def install_hint(extra: str) -> str:
    return f": it is part of the extra '{extra}'; run pip install '.[{extra}]' in a clone of trinitylake-ops"


@pytest.fixture
def root(tmp_path: Path) -> str:
    lake = Lakehouse.create(str(tmp_path / "lake"), {"fsync": "false"})
    rows = pa.table({"id": [1, 2]})
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    catalog.create_table("ns.t", rows.schema).append(rows)
    return lake.root


def test_core_runs_commands_on_local_disk(tmp_path: Path) -> None:
    program = (
        "import json, os, sys\nfrom trinitylake_ops.cli.app import run\nos.chdir(sys.argv[1])\ncodes = []\n"
        "for command in json.loads(sys.argv[2]):\n"
        "    sys.argv = ['trinitylake', '--root', os.getcwd() + '/lake', *command]\n    codes.append(run())\n"
        "sys.exit(str(codes) if any(codes) else 0)"
    )
    process = run_without(extra_modules_of([]), program, str(tmp_path), json.dumps(COMMANDS))
    assert (process.returncode, process.stderr) == (0, "Page: verify.html\nNothing to do.\n")
    assert "rollback" in process.stdout
    assert (tmp_path / "verify.html").stat().st_size > 1_000


def test_core_reads_and_writes_tables(root: str) -> None:
    program = (
        "import sys, pyarrow as pa\nfrom trinitylake_ops import Lakehouse, operations\n"
        "from trinitylake_ops.iceberg import catalog_at\n"
        "lake = Lakehouse.open(sys.argv[1])\ntable = catalog_at(lake).load_table('ns.t')\n"
        "table.append(pa.table({'id': [3]}))\ntable.delete('id = 1')\n"
        "print(table.refresh().scan().to_arrow()['id'].to_pylist(), len(operations.verify(lake, deep=True).findings))"
    )
    process = run_without(extra_modules_of([]), program, root)
    assert process.stderr == ""
    ids, errors = process.stdout.strip().split("] ", 1)
    assert (sorted(json.loads(f"{ids}]")), errors) == ([2, 3], "0")


#: Modules in the namespace package google, to which a dependency of the core also belongs.
GOOGLE_MODULES = ("google.auth", "google.oauth2", "google.rpc")
#: A command that needs each extra.
COMMAND_BY_EXTRA = {
    "s3": ["--root", "s3://bucket/lake", "log"],
    "obstore": ["--root", "s3://bucket/lake", "--storage-option", "client=obstore", "log"],
    "gcs": ["--root", "gs://bucket/lake", "log"],
    "dynamodb": ["--root", "dynamodb://table/lake", "log"],
    "redis": ["--root", "redis://host/0/lake", "log"],
    "azure": ["--root", "abfss://box@account.dfs.core.windows.net/lake", "log"],
    "hdfs": ["--root", "hdfs://namenode:8020/lake", "log"],
    "spark": ["--root", "ROOT", "verify", "--engine", "spark"],
    "connect": ["--root", "ROOT", "verify", "--engine", "spark", "--spark-remote", "sc://127.0.0.1:1"],
    "server": ["serve", "ROOT"],
}


@pytest.mark.parametrize("extra", COMMAND_BY_EXTRA)
def test_command_without_extra_fails_with_one_line(root: str, extra: str) -> None:
    installed_extras = {"obstore": ["s3"], "connect": ["spark"]}.get(extra, [])
    arguments = [root if argument == "ROOT" else argument for argument in COMMAND_BY_EXTRA[extra]]
    process = run_without(extra_modules_of(installed_extras), CLI, *arguments)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.startswith("Error: ")
    assert process.stderr.endswith(f" is not installed{install_hint(extra)}\n")
    assert process.stderr.count("\n") == 1


def test_compaction_by_spark_without_extra_fails(root: str) -> None:
    catalog_at(Lakehouse.open(root)).load_table("ns.t").append(pa.table({"id": [3]}))
    command = ["compact-tables", "--yes", "--engine", "spark", "--min-input-files", "2"]
    process = run_without(extra_modules_of([]), CLI, "--root", root, *command)
    assert (process.returncode, process.stderr) == (2, f"Error: pyspark is not installed{install_hint('spark')}\n")


def test_missing_java_error_names_extra(root: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The extra is only one way to install Java, so this fails like a missing resource, not like a missing extra."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    process = run_without(extra_modules_of(["spark"]), CLI, "--root", root, "verify", "--engine", "spark")
    assert (process.returncode, process.stderr.count("\n")) == (4, 1)
    assert "install it, or run pip install '.[java]' in a clone of trinitylake-ops" in process.stderr


IMPORT_BY_EXTRA = {
    "spark": "from trinitylake_ops.spark import build_session",
    "dagster": "from trinitylake_ops.dagster_plugin import TrinityLakeResource",
    "airflow": "from trinitylake_ops.airflow_plugin import TrinityLakeHook",
    "s3": "from trinitylake_ops import Lakehouse; Lakehouse.open('s3://bucket/lake')",
    "obstore": "from trinitylake_ops import Lakehouse; Lakehouse.open('s3://bucket/lake', {'client': 'obstore'})",
    "gcs": "from trinitylake_ops import Lakehouse; Lakehouse.open('gs://bucket/lake')",
    "dynamodb": "from trinitylake_ops import Lakehouse; Lakehouse.open('dynamodb://table/lake')",
    "redis": "from trinitylake_ops import Lakehouse; Lakehouse.open('redis://host/0/lake')",
    "azure": "from trinitylake_ops import Lakehouse; Lakehouse.open('az://box/lake', {'account_name': 'account'})",
    "hdfs": "from trinitylake_ops import Lakehouse; Lakehouse.open('hdfs://namenode:8020/lake')",
}


@pytest.mark.parametrize("extra", IMPORT_BY_EXTRA)
def test_public_name_without_extra_raises_missing_extra_error(extra: str) -> None:
    program = (
        "from trinitylake_ops.errors import MissingExtraError\n"
        f"try:\n    {IMPORT_BY_EXTRA[extra]}\nexcept MissingExtraError as error:\n    print(error.extra, error)"
    )
    process = run_without(extra_modules_of([]), program)
    assert process.stderr == ""
    assert process.stdout.startswith(f"{extra} ")
    assert process.stdout.endswith(f"{install_hint(extra)}\n")


def test_demo_without_extra_fails_with_one_line() -> None:
    process = run_without(
        extra_modules_of(["dagster"]),
        "import runpy\nrunpy.run_module('trinitylake_ops.demo', run_name='__main__')",
    )
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == f"Error: pyspark is not installed{install_hint('demo')}\n"


PIPELINE = """
import json, sys
import dagster as dg, pyarrow as pa
from trinitylake_ops import Lakehouse
import trinitylake_ops.dagster_plugin as plugin

for name in plugin.__all__:
    getattr(plugin, name)
lakehouse = plugin.TrinityLakeResource(root=sys.argv[1], storage_options=plugin.StorageSettings(fsync="false"))
engine = plugin.TrinityLakeResource(root=sys.argv[1], engine="spark")

@dg.asset(key=["sales", "orders"], io_manager_key="io")
def orders() -> pa.Table:
    return pa.table({"id": [1, 2]})

publish = plugin.build_publish_asset(key=["publish", "sales"], tables={"orders": orders.key}, description="all")
resources = {"io": plugin.TrinityLakeIOManager(lakehouse=lakehouse), "lakehouse": lakehouse}
with dg.DagsterInstance.ephemeral() as instance:
    result = dg.materialize([orders, publish], resources=resources, instance=instance)
    assert result.success
    definitions = plugin.build_trinitylake_definitions(plugin.LakehouseSettings(name="", lakehouse=lakehouse))
    verify = definitions.resolve_job_def("verify").execute_in_process(instance=instance, raise_on_error=False)
    definitions = plugin.build_trinitylake_definitions(plugin.LakehouseSettings(name="", lakehouse=engine))
    spark_verify = definitions.resolve_job_def("verify").execute_in_process(instance=instance, raise_on_error=False)
failures = [event.step_failure_data.error for event in spark_verify.all_events if event.is_step_failure]
messages = [cause.message for error in failures for cause in (error, error.cause) if cause is not None]
tables = Lakehouse.open(sys.argv[1]).snapshot().tables("sales")
print(json.dumps([tables, verify.success, spark_verify.success, messages]))
"""


def test_dagster_plugin_works_without_spark(root: str) -> None:
    process = run_without(extra_modules_of(["dagster"]), PIPELINE, root)
    assert process.returncode == 0, process.stderr[-4_000:]
    tables, succeeded, spark_succeeded, messages = json.loads(process.stdout.splitlines()[-1])
    assert (tables, succeeded, spark_succeeded) == (["orders"], True, False)
    assert any(f"pyspark is not installed{install_hint('spark')}" in text for text in messages)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("import something_else_entirely", "No module named 'something_else_entirely'"),
        ("from os import no_such_name", "cannot import name 'no_such_name'"),
        ("import pyspark.nowhere", "No module named 'pyspark.nowhere'"),
    ],
)
def test_import_error_with_another_cause_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, message: str
) -> None:
    (tmp_path / "broken_module.py").write_text(broken)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ImportError, match=message) as caught, needs("spark"):
        import broken_module  # noqa: F401
    assert caught.type in (ImportError, ModuleNotFoundError)
    sys.modules.pop("broken_module", None)


def test_wrapped_module_not_found_error_names_extra() -> None:
    with (
        pytest.raises(MissingExtraError, match="'connect'") as caught,
        needs("connect"),
    ):
        try:
            raise ModuleNotFoundError("No module named 'pandas'", name="pandas")
        except ModuleNotFoundError as error:
            raise ImportError("[PACKAGE_NOT_INSTALLED] Pandas >= 2.2.0 must be installed") from error
    assert isinstance(caught.value, InvalidInputError)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("extra", sorted(EXTRAS.keys() - SEPARATE_EXTRAS.keys()))
def test_modules_of_extra_come_from_its_declared_dependencies(extra: str) -> None:
    installed = installed_with([extra])
    providers = packages_distributions()
    for module in EXTRAS[extra]:
        distributions = {canonicalize_name(name) for name in providers[module.partition(".")[0]]}
        assert distributions & installed, module
        assert module.partition(".")[0] in extra_modules_of([]) or module in GOOGLE_MODULES, f"{module} is in the core"
    providing = {canonicalize_name(name) for module in EXTRAS[extra] for name in providers[module.partition(".")[0]]}
    assert distributions_of(extra) - {"fsspec"} <= providing


def test_setup_installs_every_extra() -> None:
    setup_script = (PROJECT / "scripts" / "setup_venv.sh").read_text()
    pin_script = (PROJECT / "scripts" / "update_constraints.sh").read_text()
    for pattern, script in ((r"extras=(\S+)\n", setup_script), (r"--editable '\.\[(.*?)\]'", pin_script)):
        extras = {*re.findall(pattern, script)[0].split(",")}
        assert {*extras, *EXTRAS, ""} == set(declared_requirements())
        assert not SEPARATE_EXTRAS.keys() & extras
    # Packages that only `make bench` and `make dist` install are also pinned.
    groups = set(re.findall(r"groups=\(([a-z ]+)", setup_script)[0].split())
    assert groups | {"bench", "release"} == set(dependency_groups()) == set(re.findall(r"--group=(\w+)", pin_script))
    # The extra "contract" is for authors of storages, not for users.
    user_extras = EXTRAS.keys() - {"contract"} - SEPARATE_EXTRAS.keys()
    assert distributions_of("all") == {name for extra in user_extras for name in distributions_of(extra)}


#: The extras of each environment whose size is reported.
ENVIRONMENTS = {"core": (), "s3": ("s3",), "spark": ("spark",), "dagster": ("dagster",), "all": ("all",)}


@pytest.mark.soak
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_fresh_environment_runs_commands(name: str, tmp_path: Path, record_property: pytest.RecordProperty) -> None:
    environment = make_environment(tmp_path / name, ENVIRONMENTS[name])
    command_s = _run_commands(environment, tmp_path)
    megabytes = [
        f"{size / 1e6:.0f}" for size in (environment.n_bytes, environment.n_bytes - environment.bytecode_bytes)
    ]
    row = (name, environment.n_packages, *megabytes, f"{environment.install_s:.0f}", f"{command_s:.1f}")
    record_property(SUMMARY_PROPERTY, f"| {' | '.join(map(str, row))} |")
    if name == "core":
        assert environment.n_bytes - environment.bytecode_bytes <= MAX_CORE_BYTES
        process = environment.run("trinitylake", "--root", "s3://bucket/lake", "log")
        assert (process.returncode, process.stderr.count("\n")) == (2, 1)


def _run_commands(environment: Environment, folder: Path) -> float:
    """Run the commands of a core installation as a user would, and return their total time in seconds."""
    started = time.monotonic()
    for command in COMMANDS:
        process = environment.run("trinitylake", "--root", str(folder / "lake"), *command, cwd=folder)
        assert process.returncode == 0, (command, process.stderr)
    return time.monotonic() - started
