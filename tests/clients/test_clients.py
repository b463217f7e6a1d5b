"""Third-party clients read, write and read an earlier version, and cannot write to the earlier version.

Each client has a separate environment, which is installed once. pyiceberg, DuckDB and Polars are in the test
environment and are also tested in ``tests/server``.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.clients.jars import make_shaded_jar
from tests.lakes import Lakes, lakes
from tests.server.live_server import command, duckdb_with_iceberg
from tests.servers.downloads import cached_folder
from tests.servers.npm import installed
from tests.servers.radosgw import ROLE_ARN
from tests.servers.s3_server import S3Server
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.storage.options import OPTIONS_VARIABLE

__all__ = ["lakes"]
pytestmark = pytest.mark.soak

HERE = Path(__file__).parent
ROWS = pa.table({"id": pa.array([1, 2], pa.int64()), "amount": [9.5, 20.0]})
#: The packages of each client, with the versions in the documentation.
REQUIREMENTS = {
    "with_daft": ("daft==0.7.26", "pyiceberg[s3fs]==0.11.1", "pyarrow"),
    "with_sail": ("pysail==0.7.2", "pyspark-client==4.1.3", "pandas", "pyarrow"),
    "with_dlt": ("dlt-iceberg==0.6.4", "dlt<1.20", "pyarrow"),
    "with_dagster_iceberg": ("dagster-iceberg==0.3.14", "pyarrow"),
    "with_dagster_iceberg_deployed": (
        "dagster-iceberg==0.3.14",
        f"dagster=={version('dagster')}",
        "pyarrow",
        "sqlalchemy",
    ),
    "with_clickhouse": ("chdb==4.4.0", "pyarrow", "pandas"),
    "with_spark": ("pyspark==3.5.9", "snowpark-connect-deps-iceberg==1.0.3", "bodo-iceberg-connector==2026.10"),
}
#: Only the jars of these packages are needed, so they are installed without dependencies.
_WITHOUT_DEPENDENCIES = ("with_spark",)
#: Prefixes of Spark's jars whose classes the runtime needs under shaded names.
_SHADED_JARS = ("jackson-annotations-2", "jackson-core-2", "jackson-databind-2", "jackson-datatype-jsr310-2")
#: Patterns of the jars of the AWS SDK and its dependencies, with which the runtime accesses S3.
_S3_JARS = ("*-2.29.26.jar", "eventstream-1*.jar", "reactive-streams-1*.jar")
_TIMEOUT_S = 600


def python_of(program: str) -> Path:
    """Return the Python interpreter of a client's environment, which is installed on the first run."""
    requirements = REQUIREMENTS[program]

    def install(folder: Path) -> None:
        uv = [str(Path(sys.executable).with_name("uv"))]
        subprocess.run(
            [*uv, "venv", "--quiet", "--relocatable", "--python", sys.executable, str(folder / "v")], check=True
        )
        options = ["--no-deps", "py4j==0.10.9.7"] if program in _WITHOUT_DEPENDENCIES else []
        install = [
            *uv,
            "pip",
            "install",
            "--quiet",
            "--python",
            str(folder / "v" / "bin" / "python"),
            *requirements,
            *options,
        ]
        subprocess.run(install, check=True, timeout=_TIMEOUT_S)

    name = f"{program}-{hashlib.sha256(repr(requirements).encode()).hexdigest()[:16]}"
    return cached_folder(name, install) / "v" / "bin" / "python"


def run(*arguments: str, **environment: str) -> Any:
    """Run a client program without credentials in its environment, and return the JSON in its last line."""
    basic_variables = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    inherited = {
        **basic_variables,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
    }
    process = subprocess.run(
        arguments, env={**inherited, **environment}, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    assert process.returncode == 0, f"{process.stdout[-3_000:]}\n{process.stderr[-5_000:]}"
    return json.loads(process.stdout.splitlines()[-1])


def run_python(program: str, *arguments: str, **environment: str) -> Any:
    return run(str(python_of(program)), str(HERE / "programs" / f"{program}.py"), *arguments, **environment)


def fill(lake: Lakehouse) -> Lakehouse:
    catalog = catalog_at(lake)
    catalog.create_namespace("sales")  # version 1
    table = catalog.create_table("sales.orders", ROWS.schema)
    table.append(ROWS)  # version 3
    table.append(ROWS)
    return lake


def serving(lake: Lakehouse, *arguments: str) -> Iterator[str]:
    with command(lake.root, "--anonymous-writes", *arguments) as (process, url, _ready):
        assert process.stderr is not None
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield url


@pytest.fixture
def lake(lakes: Lakes) -> Lakehouse:
    return fill(lakes.local())


@pytest.fixture
def url(lake: Lakehouse) -> Iterator[str]:
    yield from serving(lake)


@pytest.fixture
def s3_lake(radosgw: S3Server, monkeypatch: pytest.MonkeyPatch) -> Lakehouse:
    for name, value in radosgw.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(OPTIONS_VARIABLE, "addressing_style=path")
    return fill(Lakehouse.create(radosgw.fresh_root(), {"addressing_style": "path"}))


@pytest.fixture
def s3_url(s3_lake: Lakehouse) -> Iterator[str]:
    yield from serving(s3_lake, "--vend-role", ROLE_ARN)


def test_daft_reads_and_writes(url: str, lake: Lakehouse) -> None:
    assert run_python("with_daft", url) == {"filtered": 2, "latest": 5, "earlier": 2, "error": "ForbiddenError"}
    assert operations.verify(lake, deep=True).findings == ()


def test_daft_uses_vended_credentials(s3_url: str, s3_lake: Lakehouse) -> None:
    result = run_python("with_daft", s3_url)
    assert result.pop("error") == "OSError"  # the session of an earlier version only allows reads
    assert result == {"filtered": 2, "latest": 5, "earlier": 2}
    assert operations.verify(s3_lake, deep=True).findings == ()


def test_polars_uses_vended_credentials(s3_url: str, s3_lake: Lakehouse) -> None:
    result = run(sys.executable, str(HERE / "programs" / "with_polars.py"), s3_url)
    assert result.pop("error") == "OSError"  # the session of an earlier version only allows reads
    assert result == {"filtered": 2, "latest": 5, "earlier": 2}
    assert operations.verify(s3_lake, deep=True).findings == ()


def test_sail_reads_and_writes(url: str, lake: Lakehouse) -> None:
    check_sail(url, lake, {})


def check_sail(url: str, lake: Lakehouse, environment: dict[str, str]) -> None:
    earlier_counts = {"snapshot": 2, "timestamp": 2}
    assert run_python("with_sail", url, "main", **environment) == {
        **earlier_counts,
        "before": 4,
        "created": 1,
        "after": 5,
    }
    earlier = run_python("with_sail", url, "v3", **environment)
    assert "403 Forbidden" in earlier.pop("error")
    assert earlier == {**earlier_counts, "before": 2, "after": 2}
    assert operations.verify(lake, deep=True).findings == ()


def test_sail_uses_own_credentials(s3_url: str, s3_lake: Lakehouse, radosgw: S3Server) -> None:
    """Sail does not support vended credentials yet."""
    keys = {**radosgw.environment, "AWS_ALLOW_HTTP": "true", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false"}
    check_sail(s3_url, s3_lake, keys)


def test_dlt_iceberg_reads_and_writes(url: str, lake: Lakehouse) -> None:
    result = run_python("with_dlt", url)
    assert "read-only" in result.pop("error")
    assert result == {"rows": 4, "earlier": 2}
    assert operations.verify(lake, deep=True).findings == ()


def test_dlt_iceberg_uses_vended_credentials(s3_url: str, s3_lake: Lakehouse) -> None:
    result = run_python("with_dlt", s3_url)
    assert result.pop("error")
    assert result == {"rows": 4, "earlier": 2}
    assert operations.verify(s3_lake, deep=True).findings == ()


DAGSTER_RESULT = {"main": True, "doubled": [2, 4], "latest": [5], "earlier": [1, 2], "v3": False}


def test_dagster_iceberg_reads_and_writes(url: str, lake: Lakehouse) -> None:
    assert run_python("with_dagster_iceberg", url) == DAGSTER_RESULT
    assert operations.verify(lake, deep=True).findings == ()


def test_dagster_iceberg_uses_vended_credentials(s3_url: str, s3_lake: Lakehouse) -> None:
    assert run_python("with_dagster_iceberg", s3_url) == DAGSTER_RESULT
    assert operations.verify(s3_lake, deep=True).findings == ()


@pytest.mark.parametrize("has_keys", [False, True])
def test_clickhouse_reads_and_writes(s3_url: str, s3_lake: Lakehouse, radosgw: S3Server, has_keys: bool) -> None:
    keys = [radosgw.endpoint, radosgw.access_key_id, radosgw.secret_access_key] if has_keys else []
    result = run_python("with_clickhouse", s3_url, *keys)
    # The session of an earlier version only allows reads. With its own keys, ClickHouse writes a file that it cannot
    # commit.
    assert ("read-only" if has_keys else "S3_ERROR") in result.pop("error")
    assert result == {
        "tables": ['"sales.orders"'],
        "before": ["4,59"],
        "latest": ["7"],
        "earlier": ["2"],
        "earlier_after_insert": ["2"],
    }
    assert operations.verify(s3_lake, deep=True).findings == ()


def spark_runtime_jars(folder: Path) -> str:
    """Return the comma-separated jars that Spark needs for Iceberg's REST catalog."""
    python = python_of("with_spark")
    (site,) = (python.parents[1] / "lib").glob("python*/site-packages")
    (runtime,) = site.glob("snowpark_connect_deps_iceberg/jars/iceberg-spark-runtime-3.5_2.12-*.jar")
    spark_jars = [jar for jar in (site / "pyspark" / "jars").glob("*.jar") if jar.name.startswith(_SHADED_JARS)]
    http_jars = [*(site / "bodo_iceberg_connector" / "jars" / "libs").glob("http*5-*.jar")]
    assert (len(spark_jars), len(http_jars)) == (4, 3)
    shaded = folder / "shaded.jar"
    make_shaded_jar([*spark_jars, *http_jars], shaded)
    return f"{runtime},{shaded}"


def s3_client_jars() -> str:
    """Return the comma-separated jars with which Spark accesses S3."""
    (jars,) = python_of("with_spark").parents[1].glob("lib/python*/site-packages/bodo_iceberg_connector/jars/libs")
    selected = [str(jar) for pattern in _S3_JARS for jar in sorted(jars.glob(pattern))]
    assert len(selected) > len(_S3_JARS)
    return ",".join(selected)


def test_spark_reads_and_writes(url: str, lake: Lakehouse, tmp_path: Path) -> None:
    result = run_python("with_spark", url, spark_runtime_jars(tmp_path), str(tmp_path / "warehouse"))
    assert "version 3" in result.pop("write")
    check_spark(result, lake)


def test_spark_uses_vended_credentials(s3_url: str, s3_lake: Lakehouse, tmp_path: Path) -> None:
    jars, delegation = (
        f"{spark_runtime_jars(tmp_path)},{s3_client_jars()}",
        "header.X-Iceberg-Access-Delegation=vended-credentials",
    )
    result = run_python("with_spark", s3_url, jars, str(tmp_path / "warehouse"), delegation)
    assert "403" in result.pop("write")  # the session of an earlier version only allows reads
    check_spark(result, s3_lake)


def check_spark(result: dict[str, Any], lake: Lakehouse) -> None:
    for operation in ("purge", "expire", "orphans"):
        assert "GC is disabled" in result.pop(operation)
    assert "TABLE_OR_VIEW_NOT_FOUND" in result.pop("missing")
    assert result == {
        "before": 4,
        "earlier": 2,
        "merged": [[1, 1.0], [1, 1.0], [2, 20.0], [2, 20.0], [3, 8.0], [4, 9.0]],
        "snapshot": 2,
        "timestamp": 2,
        "deletes": 1,
        "created": [9, 10],
        "copied": 9,
        "view": 3,
        "tables": ["of_spark", "orders"],
        "after": [6, 2],
    }
    assert operations.verify(lake, deep=True).findings == ()


def test_iceberg_js_reads_and_creates_tables(url: str, tmp_path: Path) -> None:
    modules = installed(HERE / "iceberg_js", tmp_path / "npm.log")
    assert run("node", str(HERE / "programs" / "with_iceberg_js.mjs"), url, str(modules)) == {
        "namespaces": [{"namespace": ["sales"]}],
        "tables": ["of_js", "orders"],
        "latest": 2,
        "earlier": 1,
        "error": ["IcebergError", 403],
    }


def test_duckdb_uses_vended_credentials(s3_url: str, s3_lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with duckdb_with_iceberg() as connection:
        for warehouse, name in (("main", "lake"), ("v3", "earlier")):
            connection.execute(
                f"ATTACH '{warehouse}' AS {name} (TYPE iceberg, ENDPOINT '{s3_url}', AUTHORIZATION_TYPE 'none')"
            )
        connection.execute("CREATE TABLE lake.sales.of_duckdb AS SELECT 1 AS id")
        connection.execute("INSERT INTO lake.sales.orders VALUES (3, 7.0)")
        connection.execute("DELETE FROM lake.sales.orders WHERE id = 1")
        counts = {
            name: connection.execute(f"SELECT count(*) FROM {name}").fetchone()
            for name in ("lake.sales.of_duckdb", "lake.sales.orders", "earlier.sales.orders")
        }
        assert list(counts.values()) == [(1,), (3,), (2,)]
        with pytest.raises(Exception, match="Forbidden"):
            connection.execute("INSERT INTO earlier.sales.orders VALUES (3, 7.0)")
    monkeypatch.undo()
    assert operations.verify(s3_lake, deep=True).findings == ()
