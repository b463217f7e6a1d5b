"""What the plugin takes from Dagster beyond its public modules stands in one module, and fails in words without it."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import dagster as dg
import pytest

import trinitylake_ops
from trinitylake_ops.dagster_plugin import _dagster_internals

PACKAGE = Path(trinitylake_ops.__file__).parent


def test_one_module_has_all_private_names_of_dagster() -> None:
    private = re.compile(r"^\s*(?:from|import) dagster(?:\.|_\w+\.)_|\bcontext\._|\bdg\._", re.MULTILINE)
    using = [file.relative_to(PACKAGE) for file in PACKAGE.rglob("*.py") if private.search(file.read_text())]
    assert using == [Path("dagster_plugin/_dagster_internals.py")]


def test_a_dagster_that_would_show_staged_tables_as_published_is_refused() -> None:
    """As if the field had another name: the output would keep the key of its asset."""
    context = SimpleNamespace(has_asset_key=True, _key_of_the_asset=dg.AssetKey("n"))
    with pytest.raises(dg.DagsterInvalidDefinitionError, match="would show staged tables as published"):
        _dagster_internals.log_no_materialization(context)  # type: ignore[arg-type]
