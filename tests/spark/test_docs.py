"""Run every snippet of docs/spark/data-source.md and docs/spark/cluster.md in order."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from tests.lakes import check_lake
from tests.operations.changes import append_rows
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops import spark as spark_jobs
from trinitylake_ops.errors import VersionNotFoundError
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.write.arrow import stage_arrow
from trinitylake_ops.iceberg.write.publication import publication_id, publish_once

pytestmark = [
    pytest.mark.soak,
    pytest.mark.local_only("the Spark tasks of these tests read a folder"),
    pytest.mark.timeout(900),
]

DOCS = Path(__file__).parents[2] / "docs"
FLIGHTS = pa.table({"carrier": ["AA", "UA"], "month": pa.array([1, 2], pa.int32())})
ORDERS = pa.table({"id": pa.array([1, 2], pa.int64()), "day": ["mon", "tue"], "paid": [True, False]})


def snippets(page: str) -> list[tuple[str, str]]:
    """Return the language and text of each code block of a page."""
    return re.findall(r"^```(python|sql)\n(.*?)^```", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL)


def append_rows_to(lake: Lakehouse, name: str, rows: pa.Table) -> None:
    namespace, table = name.split(".")
    staged = stage_arrow(lake, rows, namespace, table, mode="append")
    publish_once(lake, [staged], publication_id(name, str(lake.latest_version())))


@pytest.fixture
def lake(tmp_path: Path) -> Lakehouse:
    """A lakehouse with more than twelve versions, and with the tables and the export that the page refers to."""
    lakehouse = Lakehouse.create(f"file://{tmp_path}/lake/", {"fsync": "false"})
    for name, rows in (("facts.flights", FLIGHTS), ("raw.orders", ORDERS), ("facts.paid", ORDERS)):
        append_rows_to(lakehouse, name, rows)
    while lakehouse.latest_version() < 12:
        append_rows_to(lakehouse, "facts.flights", FLIGHTS)
    operations.plan_export(lakehouse, "an-export", "minimal").execute()
    return lakehouse


@pytest.fixture
def other_lake(tmp_path: Path) -> Lakehouse:
    """The lakehouse to which the streams of the page write."""
    lakehouse = Lakehouse.create(f"file://{tmp_path}/other/", {"fsync": "false"})
    append_rows_to(lakehouse, "facts.copy", FLIGHTS.slice(0, 0))
    return lakehouse


def test_snippets_of_data_source_page_run(
    spark: SparkSession, lake: Lakehouse, other_lake: Lakehouse, tmp_path: Path
) -> None:
    public_names = {name: getattr(spark_jobs, name) for name in spark_jobs.__all__}
    variables = {"spark": spark, "lake": lake, "root": lake.root, "other_root": other_lake.root, "F": F}
    scope: dict[str, Any] = {
        **public_names,
        **variables,
        "maintenance": operations,
        "folder": str(tmp_path / "checkpoint"),
    }
    scope["frame"] = spark.createDataFrame([("DL", 3)], "carrier string, month int")
    public_names["register_data_source"](spark)
    blocks = snippets("spark/data-source.md")
    # First run the definitions that other snippets use.
    blocks.sort(key=lambda block: "def partition_by_day" not in block[1])
    failed_programs = []
    for language, text in blocks:
        program = text.replace("s3://bucket/lake/", lake.root)
        if language == "sql":
            now = datetime.now(UTC).isoformat()
            for statement in program.replace("2013-02-01T00:00:00Z", now).split(";"):
                if statement.strip():
                    spark.sql(statement).collect()
            continue
        try:
            exec(compile(program, "docs/spark/data-source.md", "exec"), scope)
        except VersionNotFoundError as error:
            assert f"# VersionNotFoundError: {error}".startswith("# VersionNotFoundError: version 99 does not exist")
            failed_programs.append(program)
        if (stream := scope.get("stream")) is not None:
            for query in spark.streams.active:
                query.awaitTermination()
            scope["stream"] = None
            assert stream is not None
    assert ['version", 99' in text for text in failed_programs] == [True]
    copied = catalog_at(other_lake).load_table("facts.copy").scan().to_arrow()
    flights = catalog_at(lake).load_table("facts.flights").scan().to_arrow()
    assert copied.num_rows > 0
    assert "DL" in flights["carrier"].to_pylist()
    assert catalog_at(lake).load_table("facts.daily").scan().to_arrow().num_rows == 2
    assert [field.name for field in catalog_at(lake).load_table("facts.paid").spec().fields] == ["day"]
    check_lake(lake)
    check_lake(other_lake)


def test_snippet_of_cluster_page_runs(tmp_path: Path) -> None:
    lake = Lakehouse.create(f"file://{tmp_path}/lake/", {"fsync": "false"})
    for _ in range(3):
        append_rows(lake)
    rules = operations.RetentionPolicy(maximum_age_ms=0, minimum_versions=1, protected_ms=0)
    operations.plan_expiration(lake, rules).execute()
    (text,) = (text for language, text in snippets("spark/cluster.md") if language == "python")
    program = text.replace("s3://bucket/lake", lake.root).replace("spark://host:7077", "local[1]")
    scope: dict[str, Any] = {}
    exec(compile(program, "docs/spark/cluster.md", "exec"), scope)
    assert scope["plan"].digest
