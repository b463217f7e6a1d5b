"""Clients that others wrote, each in an environment of its own: read, write, an earlier version, an error.

pyiceberg, DuckDB and Polars are in the test environment, and so in ``tests/server``. Others are fetched once.
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
from tests.servers.cached import cached_folder
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
#: What each client needs beside Python. Versions are those that the documentation names.
NEEDS = {
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
#: These packages are for their jars alone, and what they need would be much.
_ALONE = ("with_spark",)
#: What the runtime's jar shades, and has not. Spark has them, too.
_SHADED = ("jackson-annotations-2", "jackson-core-2", "jackson-databind-2", "jackson-datatype-jsr310-2")
#: Jars of Amazon's SDK, by which the runtime reaches S3, and of what they need.
_FOR_S3 = ("*-2.29.26.jar", "eventstream-1*.jar", "reactive-streams-1*.jar")
_SECONDS = 600


def python_of(program: str) -> Path:
    """Return the Python of a client's environment, which is made on the first run and kept."""
    needs = NEEDS[program]

    def install(folder: Path) -> None:
        uv = [str(Path(sys.executable).with_name("uv"))]
        subprocess.run(
            [*uv, "venv", "--quiet", "--relocatable", "--python", sys.executable, str(folder / "v")], check=True
        )
        alone = ["--no-deps", "py4j==0.10.9.7"] if program in _ALONE else []
        install = [*uv, "pip", "install", "--quiet", "--python", str(folder / "v" / "bin" / "python"), *needs, *alone]
        subprocess.run(install, check=True, timeout=_SECONDS)

    name = f"{program}-{hashlib.sha256(repr(needs).encode()).hexdigest()[:16]}"
    return cached_folder(name, install) / "v" / "bin" / "python"


def run(*arguments: str, **environment: str) -> Any:
    """Run a program of a client, which has no keys in its environment; returns the JSON in its last line."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    given = {**kept, "AWS_EC2_METADATA_DISABLED": "true", "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required"}
    done = subprocess.run(
        arguments, env={**given, **environment}, capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-3_000:]}\n{done.stderr[-5_000:]}"
    return json.loads(done.stdout.splitlines()[-1])


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
    with command(lake.root, "--anonymous-writes", *arguments) as (process, url, _begun):
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
def on_s3(radosgw: S3Server, monkeypatch: pytest.MonkeyPatch) -> Lakehouse:
    for name, value in radosgw.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(OPTIONS_VARIABLE, "addressing_style=path")
    return fill(Lakehouse.create(radosgw.fresh_root(), {"addressing_style": "path"}))


@pytest.fixture
def s3_url(on_s3: Lakehouse) -> Iterator[str]:
    yield from serving(on_s3, "--vend-role", ROLE_ARN)


def test_daft(url: str, lake: Lakehouse) -> None:
    assert run_python("with_daft", url) == {"filtered": 2, "now": 5, "then": 2, "error": "ForbiddenError"}
    assert operations.verify(lake, deep=True).findings == ()


def test_daft_without_keys(s3_url: str, on_s3: Lakehouse) -> None:
    found = run_python("with_daft", s3_url)
    assert found.pop("error") == "OSError"  # the session of an earlier version only reads
    assert found == {"filtered": 2, "now": 5, "then": 2}
    assert operations.verify(on_s3, deep=True).findings == ()


def test_polars_without_keys(s3_url: str, on_s3: Lakehouse) -> None:
    found = run(sys.executable, str(HERE / "programs" / "with_polars.py"), s3_url)
    assert found.pop("error") == "OSError"  # the session of an earlier version only reads
    assert found == {"filtered": 2, "now": 5, "then": 2}
    assert operations.verify(on_s3, deep=True).findings == ()


def test_sail(url: str, lake: Lakehouse) -> None:
    check_sail(url, lake, {})


def check_sail(url: str, lake: Lakehouse, environment: dict[str, str]) -> None:
    first = {"snapshot": 2, "moment": 2}
    assert run_python("with_sail", url, "main", **environment) == {**first, "before": 4, "made": 1, "after": 5}
    earlier = run_python("with_sail", url, "v3", **environment)
    assert "403 Forbidden" in earlier.pop("error")
    assert earlier == {**first, "before": 2, "after": 2}
    assert operations.verify(lake, deep=True).findings == ()


def test_sail_with_keys(s3_url: str, on_s3: Lakehouse, radosgw: S3Server) -> None:
    """Sail says that it cannot use sessions of the server yet."""
    keys = {**radosgw.environment, "AWS_ALLOW_HTTP": "true", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false"}
    check_sail(s3_url, on_s3, keys)


def test_dlt_iceberg(url: str, lake: Lakehouse) -> None:
    found = run_python("with_dlt", url)
    assert "read-only" in found.pop("error")
    assert found == {"rows": 4, "earlier": 2}
    assert operations.verify(lake, deep=True).findings == ()


def test_dlt_iceberg_without_keys(s3_url: str, on_s3: Lakehouse) -> None:
    found = run_python("with_dlt", s3_url)
    assert found.pop("error")
    assert found == {"rows": 4, "earlier": 2}
    assert operations.verify(on_s3, deep=True).findings == ()


FROM_DAGSTER = {"main": True, "doubled": [2, 4], "now": [5], "then": [1, 2], "v3": False}


def test_dagster_iceberg(url: str, lake: Lakehouse) -> None:
    assert run_python("with_dagster_iceberg", url) == FROM_DAGSTER
    assert operations.verify(lake, deep=True).findings == ()


def test_dagster_iceberg_without_keys(s3_url: str, on_s3: Lakehouse) -> None:
    assert run_python("with_dagster_iceberg", s3_url) == FROM_DAGSTER
    assert operations.verify(on_s3, deep=True).findings == ()


@pytest.mark.parametrize("has_keys", [False, True])
def test_clickhouse(s3_url: str, on_s3: Lakehouse, radosgw: S3Server, has_keys: bool) -> None:
    keys = [radosgw.endpoint, radosgw.access_key_id, radosgw.secret_access_key] if has_keys else []
    found = run_python("with_clickhouse", s3_url, *keys)
    # The session of an earlier version only reads. With keys of its own it writes a file, which no commit takes.
    assert ("read-only" if has_keys else "S3_ERROR") in found.pop("error")
    assert found == {
        "tables": ['"sales.orders"'], "before": ["4,59"], "now": ["7"], "then": ["2"], "still": ["2"],
    }  # fmt: skip
    assert operations.verify(on_s3, deep=True).findings == ()


def jars_of_spark(folder: Path) -> str:
    """Return the jars that Spark needs for Iceberg's REST catalog, as a setting of Spark."""
    python = python_of("with_spark")
    (site,) = (python.parents[1] / "lib").glob("python*/site-packages")
    (runtime,) = site.glob("snowpark_connect_deps_iceberg/jars/iceberg-spark-runtime-3.5_2.12-*.jar")
    of_spark = [jar for jar in (site / "pyspark" / "jars").glob("*.jar") if jar.name.startswith(_SHADED)]
    of_http = [*(site / "bodo_iceberg_connector" / "jars" / "libs").glob("http*5-*.jar")]
    assert (len(of_spark), len(of_http)) == (4, 3)
    shaded = folder / "shaded.jar"
    make_shaded_jar([*of_spark, *of_http], shaded)
    return f"{runtime},{shaded}"


def jars_for_s3() -> str:
    """Return the jars by which Spark reaches S3."""
    (jars,) = python_of("with_spark").parents[1].glob("lib/python*/site-packages/bodo_iceberg_connector/jars/libs")
    found = [str(jar) for pattern in _FOR_S3 for jar in sorted(jars.glob(pattern))]
    assert len(found) > len(_FOR_S3)
    return ",".join(found)


def test_spark_with_icebergs_java_runtime(url: str, lake: Lakehouse, tmp_path: Path) -> None:
    found = run_python("with_spark", url, jars_of_spark(tmp_path), str(tmp_path / "warehouse"))
    assert "version 3" in found.pop("written")
    check_spark(found, lake)


def test_spark_without_keys(s3_url: str, on_s3: Lakehouse, tmp_path: Path) -> None:
    jars, asking = f"{jars_of_spark(tmp_path)},{jars_for_s3()}", "header.X-Iceberg-Access-Delegation=vended-credentials"
    found = run_python("with_spark", s3_url, jars, str(tmp_path / "warehouse"), asking)
    assert "403" in found.pop("written")  # the session of an earlier version only reads
    check_spark(found, on_s3)


def check_spark(found: dict[str, Any], lake: Lakehouse) -> None:
    for refused in ("purge", "expire", "orphans"):
        assert "GC is disabled" in found.pop(refused)
    assert "TABLE_OR_VIEW_NOT_FOUND" in found.pop("missing")
    assert found == {
        "before": 4,
        "earlier": 2,
        "merged": [[1, 1.0], [1, 1.0], [2, 20.0], [2, 20.0], [3, 8.0], [4, 9.0]],
        "snapshot": 2,
        "moment": 2,
        "deletes": 1,
        "made": [9, 10],
        "copied": 9,
        "view": 3,
        "tables": ["of_spark", "orders"],
        "after": [6, 2],
    }
    assert operations.verify(lake, deep=True).findings == ()


def test_iceberg_js(url: str, tmp_path: Path) -> None:
    modules = installed(HERE / "iceberg_js", tmp_path / "npm.log")
    assert run("node", str(HERE / "programs" / "with_iceberg_js.mjs"), url, str(modules)) == {
        "namespaces": [{"namespace": ["sales"]}],
        "tables": ["of_js", "orders"],
        "now": 2,
        "then": 1,
        "error": ["IcebergError", 403],
    }


def test_duckdb_without_keys(s3_url: str, on_s3: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert operations.verify(on_s3, deep=True).findings == ()
