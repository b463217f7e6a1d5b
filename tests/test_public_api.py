"""What users import: the faces of the package, and nothing else. Names that are there stay there."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

PUBLIC = {
    "trinitylake_ops": {
        "Column", "DataType", "Lakehouse", "Schema", "Snapshot", "TableDef", "Transaction", "errors", "operations",
    },
    "trinitylake_ops.iceberg": {
        "Replace", "StagedTable", "StagingCatalog", "TrinityLakeCatalog", "catalog_at", "catalog_for", "load_staged",
        "plan_write", "publish", "publish_once", "stage_arrow", "stage_data_files",
    },
    "trinitylake_ops.spark": {
        "PipelineRun", "build_session", "catalog_settings", "create_views", "read_metadata", "read_table",
        "register_catalog", "register_data_source", "register_table_functions", "session_scope", "spark_executor",
        "spark_failures", "stage_dataframe", "write_groups_on",
    },
    "trinitylake_ops.storage": {
        "FileInfo", "LocalStorage", "Measurement", "MemoryStorage", "MeteredStorage", "RequestCounts", "RetryStorage",
        "Storage", "StorageWrapper", "TEMPORARY_PREFIX", "clear_process_caches", "drop_memory_root", "open_storage",
        "run_parallel",
    },
}  # fmt: skip
FACES = [*PUBLIC, "trinitylake_ops.operations", "trinitylake_ops.dagster_plugin"]
#: Airflow is in an environment of its own.
APART = "trinitylake_ops.airflow_plugin"
#: Paths that users wrote into their configuration.
CONFIGURED = (
    "trinitylake_ops.iceberg.catalog.TrinityLakeCatalog",
    "trinitylake_ops.dagster_plugin.component.TrinityLakeMaintenanceComponent",
)
_IMPORT = re.compile(r"^\s*(?:from (trinitylake_ops[\w.]*) import|import (trinitylake_ops[\w.]*))", re.MULTILINE)


@pytest.mark.parametrize("face", FACES)
def test_a_face_shows_what_it_offers(face: str) -> None:
    module = importlib.import_module(face)
    assert dir(module) == sorted(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="no attribute"):
        vars(module)["__getattr__"]("nothing_of_this_name")


@pytest.mark.parametrize("face", PUBLIC)
def test_public_names_are_those_that_are_documented(face: str) -> None:
    assert set(importlib.import_module(face).__all__) == PUBLIC[face]


@pytest.mark.parametrize("path", CONFIGURED)
def test_paths_that_users_configured_are_there(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert getattr(importlib.import_module(module), name).__name__ == name


@pytest.mark.parametrize("face", [*FACES, APART])
def test_a_face_loads_nothing_heavy(face: str) -> None:
    code = f"import sys, {face}; print([m for m in ('pyarrow', 'pyiceberg', 'pyspark', 'dagster') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("path", ["README.md", "docs", "examples", "definitions.py"])
def test_documents_import_from_faces_only(path: str) -> None:
    root = Path(__file__).parent.parent / path
    files = [root] if root.is_file() else [*root.rglob("*.md"), *root.rglob("*.py")]
    found = {
        (str(file.relative_to(root.parent)), match[1] or match[2])
        for file in files
        if "decisions" not in file.parts
        for match in _IMPORT.finditer(file.read_text())
    }
    demo = {"trinitylake_ops.demo.assets", "trinitylake_ops.cli"}
    assert not {(file, module) for file, module in found if module not in {*FACES, *demo}}
