"""The public API: the modules from which users import, and the names in them. Public names are not removed."""

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
MODULES = [*PUBLIC, "trinitylake_ops.operations", "trinitylake_ops.dagster_plugin"]
#: A public module that is not imported here, because Airflow is installed in a separate environment.
AIRFLOW_MODULE = "trinitylake_ops.airflow_plugin"
#: Paths that users have in their configuration.
CONFIGURED_PATHS = (
    "trinitylake_ops.iceberg.catalog.TrinityLakeCatalog",
    "trinitylake_ops.dagster_plugin.component.TrinityLakeMaintenanceComponent",
)
_IMPORT = re.compile(r"^\s*(?:from (trinitylake_ops[\w.]*) import|import (trinitylake_ops[\w.]*))", re.MULTILINE)


@pytest.mark.parametrize("name", MODULES)
def test_public_module_lists_its_names(name: str) -> None:
    module = importlib.import_module(name)
    assert dir(module) == sorted(module.__all__)
    for attribute in module.__all__:
        assert getattr(module, attribute) is not None
    with pytest.raises(AttributeError, match="no attribute"):
        vars(module)["__getattr__"]("no_such_name")


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_unchanged(name: str) -> None:
    assert set(importlib.import_module(name).__all__) == PUBLIC[name]


@pytest.mark.parametrize("path", CONFIGURED_PATHS)
def test_configured_paths_exist(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert getattr(importlib.import_module(module), name).__name__ == name


@pytest.mark.parametrize("name", [*MODULES, AIRFLOW_MODULE])
def test_public_module_imports_no_heavy_library(name: str) -> None:
    code = f"import sys, {name}; print([m for m in ('pyarrow', 'pyiceberg', 'pyspark', 'dagster') if m in sys.modules])"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"


@pytest.mark.parametrize("path", ["README.md", "docs", "examples", "definitions.py"])
def test_documentation_imports_only_public_modules(path: str) -> None:
    root = Path(__file__).parent.parent / path
    files = [root] if root.is_file() else [*root.rglob("*.md"), *root.rglob("*.py")]
    imports = {
        (str(file.relative_to(root.parent)), match[1] or match[2])
        for file in files
        if "decisions" not in file.parts
        for match in _IMPORT.finditer(file.read_text())
    }
    demo_modules = {"trinitylake_ops.demo.assets", "trinitylake_ops.cli"}
    assert not {(file, module) for file, module in imports if module not in {*MODULES, *demo_modules}}
