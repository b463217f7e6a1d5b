"""Run every snippet of docs/rest-catalog/run.md in order. The page itself starts the server."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.server.live_server import command, duckdb_with_iceberg
from trinitylake_ops import Lakehouse
from trinitylake_ops.server.issuers import read_issuers
from trinitylake_ops.server.routes import ENDPOINTS
from trinitylake_ops.server.settings import read_lakehouses
from trinitylake_ops.server.tokens import Scope, Tokens

PAGE = Path(__file__).parents[2] / "docs" / "rest-catalog" / "run.md"
_SNIPPET = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_ADDRESS = "http://127.0.0.1:8181"


def snippets() -> list[tuple[str, str]]:
    return _SNIPPET.findall(PAGE.read_text())


def test_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    all_snippets = snippets()
    (start,) = [text for kind, text in all_snippets if kind == "sh" and " init" in text]
    _, init, serve = (shlex.split(line.replace("/data/lake", str(tmp_path / "lake"))) for line in start.splitlines())
    assert init[:1] == serve[:1] == ["trinitylake"]
    root = init[2]
    Lakehouse.create(root, {"fsync": "false"})
    namespace: dict[str, object] = {}
    counts: list[object] = []
    with command(*serve[2:]) as (_, url, _begun), duckdb_with_iceberg() as connection:
        for kind, text in all_snippets:
            snippet = text.replace(_ADDRESS, url)
            if kind == "python":
                exec(compile(snippet, str(PAGE), "exec"), namespace)
            elif kind == "sql":
                statements = [sql for sql in snippet.split(";\n") if not sql.startswith(("INSTALL", "LOAD")) and sql]
                counts = [connection.execute(sql).fetchall() for sql in statements]
            elif "curl" in text:
                process = subprocess.run(shlex.split(snippet), capture_output=True, text=True, check=True)
                assert ENDPOINTS[0] in process.stdout
    assert counts[-1] == [(2,)]
    assert capsys.readouterr().out.count("9.5") >= 2
    lake = Lakehouse.open(root)
    duckdb_version = next(info for info in lake.history() if info.message and ";" in info.message)
    assert {change.table for change in lake.diff(duckdb_version.version - 1, duckdb_version.version)} == {
        "orders",
        "refunds",
    }


def test_configuration_files_are_valid(tmp_path: Path) -> None:
    files = [text for kind, text in snippets() if kind == "yaml"]
    for name, text in zip(("lakehouses", "tokens", "issuers"), files, strict=True):
        (tmp_path / name).write_text(text)
    assert list(read_lakehouses(tmp_path / "lakehouses")) == ["sales", "archive"]
    principals = Tokens(tmp_path / "tokens").principals()
    etl, operator = (
        next(principal for principal in principals if principal.name == name) for name in ("etl", "operator")
    )
    assert (etl.may(Scope.WRITE, "sales"), etl.may(Scope.WRITE, "other"), etl.may(Scope.READ, "secret")) == (
        True,
        False,
        False,
    )
    assert operator.may(Scope.OPERATE, "any")
    (issuer,) = read_issuers(tmp_path / "issuers")
    assert issuer.grants["lake.etl"].namespaces == {"sales": Scope.WRITE}
