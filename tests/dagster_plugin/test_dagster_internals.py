"""Test that one module contains all uses of Dagster's private API, and that it fails clearly if they change."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import dagster as dg
import pytest

import trinitylake_ops
from trinitylake_ops.dagster_plugin import _dagster_internals

PACKAGE = Path(trinitylake_ops.__file__).parent


def test_private_names_of_dagster_are_used_in_one_module_only() -> None:
    private = re.compile(r"^\s*(?:from|import) dagster(?:\.|_\w+\.)_|\bcontext\._|\bdg\._", re.MULTILINE)
    modules = [file.relative_to(PACKAGE) for file in PACKAGE.rglob("*.py") if private.search(file.read_text())]
    assert modules == [Path("dagster_plugin/_dagster_internals.py")]


def test_incompatible_dagster_is_rejected() -> None:
    """Simulate a renamed field, which would leave the asset key on the output."""
    context = SimpleNamespace(has_asset_key=True, _key_of_the_asset=dg.AssetKey("n"))
    with pytest.raises(dg.DagsterInvalidDefinitionError, match="would show staged tables as published"):
        _dagster_internals.log_no_materialization(context)  # type: ignore[arg-type]
