"""Run every snippet of docs/rest-catalog/connect.md unchanged in the environment of its client."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.clients.test_clients import HERE, lake, lakes, python_of, s3_lake, s3_url, spark_runtime_jars, url
from tests.servers.npm import installed
from trinitylake_ops import Lakehouse
from trinitylake_ops.iceberg import catalog_at

__all__ = ["lake", "lakes", "s3_lake", "s3_url", "url"]
pytestmark = pytest.mark.soak

PAGE = HERE.parents[1] / "docs" / "rest-catalog" / "connect.md"
_SECTION = re.compile(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_SNIPPET = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_ADDRESS = "http://127.0.0.1:8181"
_TIMEOUT_S = 600
#: For each section, the environment, the table that the snippet writes, and the number of its rows afterwards.
WRITES = {
    "Daft": ("with_daft", "orders", 5),
    "Sail": ("with_sail", "orders", 5),
    "dlt": ("with_dlt", "loaded", 1),
    "dagster-iceberg": ("with_dagster_iceberg", "returns", 2),
    "Spark": ("with_spark", "orders", 3),
}
JAVASCRIPT, SQL = "iceberg-js", "ClickHouse"
#: Replaced by local jars, because the tests have no access to a registry of jars.
_PACKAGES = '"spark.jars.packages": "org.apache.iceberg:iceberg-spark-runtime-3.5_2.12:1.10.2"'
_CLICKHOUSE = """
import sys
from chdb import session
engine = session.Session()
for statement in open(sys.argv[1]).read().split(";\\n"):
    print(engine.query(statement, "CSV"))
"""


def snippets() -> dict[str, str]:
    """Return the snippets of the page by section title."""
    snippet_by_title = {}
    for title, content in _SECTION.findall(PAGE.read_text()):
        parts = [text for _kind, text in _SNIPPET.findall(content)]
        if parts:
            snippet_by_title[title] = "".join(parts)
    return snippet_by_title


def run_snippet(command: list[str], folder: Path) -> str:
    inherited = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    process = subprocess.run(
        command, env={**inherited, "HOME": str(folder)}, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S
    )
    assert process.returncode == 0, f"{process.stdout[-3_000:]}\n{process.stderr[-5_000:]}"
    return process.stdout


def test_every_snippet_is_tested() -> None:
    assert snippets().keys() == {*WRITES, JAVASCRIPT, SQL}


@pytest.mark.parametrize("title", WRITES)
def test_python_snippet_runs(title: str, url: str, lake: Lakehouse, tmp_path: Path) -> None:
    program, table, n_rows = WRITES[title]
    file = tmp_path / "snippet.py"
    text = snippets()[title].replace(_ADDRESS, url)
    if program == "with_spark":
        assert _PACKAGES in text
        text = text.replace(_PACKAGES, f'"spark.jars": "{spark_runtime_jars(tmp_path)}"')
    file.write_text(text)
    run_snippet([str(python_of(program)), str(file)], tmp_path)
    assert catalog_at(lake).load_table(f"sales.{table}").scan().to_arrow().num_rows == n_rows


def test_javascript_snippet_runs(url: str, tmp_path: Path) -> None:
    (tmp_path / "node_modules").symlink_to(installed(HERE / "iceberg_js", tmp_path / "npm.log") / "node_modules")
    file = tmp_path / "snippet.mjs"
    file.write_text(snippets()[JAVASCRIPT].replace(_ADDRESS, url))
    assert "name: 'orders'" in run_snippet(["node", str(file)], tmp_path)


def test_sql_snippet_runs(s3_url: str, s3_lake: Lakehouse, tmp_path: Path) -> None:
    file, program = tmp_path / "snippet.sql", tmp_path / "run.py"
    file.write_text(snippets()[SQL].replace(_ADDRESS, s3_url))
    program.write_text(_CLICKHOUSE)
    assert run_snippet([str(python_of("with_clickhouse")), str(program), str(file)], tmp_path).split() == ["5"]
    assert catalog_at(s3_lake).load_table("sales.orders").scan().to_arrow().num_rows == 5
