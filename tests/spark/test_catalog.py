"""Test the Spark SQL catalog in one session: statements, versions, scans, one-line errors and the documentation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from tests.lakes import check_lake
from trinitylake_ops import Lakehouse, errors, operations
from trinitylake_ops.errors import CommitConflictError, InvalidInputError, TrinityLakeError
from trinitylake_ops.format.definitions import IsolationLevel
from trinitylake_ops.spark.catalog.registration import catalog_settings, register_catalog
from trinitylake_ops.spark.runtime.errors import spark_failures

pytestmark = pytest.mark.local_only("the Spark tasks of these tests read a folder")

Sql = Callable[[str], list[tuple[Any, ...]]]
DOCS = Path(__file__).parents[2] / "docs" / "spark" / "sql-catalog.md"
OPTIONS = {"fsync": "false"}


@pytest.fixture(scope="module")
def sql(spark: SparkSession) -> Sql:
    """Return a function that runs a statement and returns its rows."""

    def run(statement: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in spark.sql(statement).collect()]

    return run


def new_lake(spark: SparkSession, folder: Path, name: str) -> Lakehouse:
    lake = Lakehouse.create(f"file://{folder}/", OPTIONS)
    register_catalog(spark, name, lake.root, OPTIONS)
    return lake


@pytest.fixture(scope="module")
def lake(spark: SparkSession, sql: Sql, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lakehouse]:
    """A lakehouse with a table and an export.

    The table has rows of two months at version 3 and of a third month at version 4. The export pins version 3.
    """
    lake = new_lake(spark, tmp_path_factory.mktemp("catalog [of] one%20lake"), "lake")
    sql("CREATE NAMESPACE lake.facts COMMENT 'what was counted'")
    columns = "id INT NOT NULL COMMENT 'the number', text STRING, month INT, share DOUBLE, at TIMESTAMP, day DATE"
    sql(f"CREATE TABLE lake.facts.days ({columns}) PARTITIONED BY (month) TBLPROPERTIES ('source' = 'a test')")
    sql(
        "INSERT INTO lake.facts.days VALUES (1, 'a', 1, 0.5, TIMESTAMP '2013-01-01 00:00:00.5', DATE '2013-01-01'),"
        " (2, NULL, 1, double('NaN'), NULL, DATE '2013-01-31'), (3, 'it''s', 2, NULL, TIMESTAMP '2013-02-01', NULL)"
    )
    sql("INSERT INTO lake.facts.days VALUES (4, 'd', 3, -1.5, TIMESTAMP '2013-03-01', DATE '2013-03-01')")
    operations.plan_export(lake, "january", "minimal", version=3).execute()
    yield lake
    check_lake(lake)


def ids(sql: Sql, clause: str) -> list[int]:
    return sorted(row[0] for row in sql(f"SELECT id FROM lake.facts.days {clause}"))


def test_version_by_number_export_and_time(sql: Sql, spark: SparkSession, lake: Lakehouse) -> None:
    latest = ids(sql, "")
    assert set(latest) >= {1, 2, 3, 4}
    created = {info.version: info.created_at for info in lake.history()}
    time = f"{created[3]:%Y-%m-%d %H:%M:%S.%f}"
    for clause in ("VERSION AS OF 3", "FOR SYSTEM_VERSION AS OF 3", "VERSION AS OF 'january'",
                   f"TIMESTAMP AS OF '{time}'", f"FOR SYSTEM_TIME AS OF '{time}'"):  # fmt: skip
        assert ids(sql, clause) == [1, 2, 3], clause
    assert ids(sql, "VERSION AS OF 2") == []
    joined = sql(
        "SELECT now.id, before.id FROM lake.facts.days VERSION AS OF 4 now"
        " LEFT JOIN lake.facts.days VERSION AS OF 3 before ON now.id = before.id ORDER BY 1"
    )
    assert joined == [(1, 1), (2, 2), (3, 3), (4, None)]
    assert spark.read.option("versionAsOf", 3).table("lake.facts.days").count() == 3


def test_query_keeps_its_version(sql: Sql, spark: SparkSession, lake: Lakehouse) -> None:
    frame = spark.table("lake.facts.days")
    before = frame.count()
    sql("INSERT INTO lake.facts.days (id, month) VALUES (5, 5)")
    assert frame.count() == before
    assert spark.table("lake.facts.days").count() == before + 1


def test_metadata_tables_have_no_namespace(sql: Sql, lake: Lakehouse) -> None:
    assert [row[1] for row in sql("SHOW TABLES IN lake")] == ["versions", "objects", "files", "changes", "exports"]
    messages = sql("SELECT version, message FROM lake.versions WHERE version <= 3 ORDER BY 1")
    assert messages == [
        (0, "create the lakehouse"),
        (1, "create namespace facts"),
        (2, "create table facts.days"),
        (3, "write facts.days"),
    ]
    assert sql("SELECT namespace, `table` FROM lake.objects VERSION AS OF 1") == [("facts", None)]
    assert sql("SELECT `table` FROM lake.objects VERSION AS OF 'january' WHERE kind = 'table'") == [("days",)]


#: Each condition matches some rows of version 4. The last ones cannot be converted to Iceberg expressions.
CONDITIONS = (
    "id = 1", "id <=> 2", "id in (1, 3, NULL)", "id > 1 AND id <= 3", "id >= 4 OR month = 1", "month < 2",
    "text = 'a'", "text IS NULL", "text IS NOT NULL AND text < 'd'", "text = 'it''s'", "NOT (text = 'a')",
    "day = DATE '2013-01-31'", "day > DATE '2013-01-01' OR text = 'a'", "at >= TIMESTAMP '2013-01-01 00:00:00.5'",
    "at < TIMESTAMP '2013-02-01' OR share < 0", "share > 1", "share = double('NaN')", "share IS NULL", "month + 1 = 2",
    "id = 1 AND share < 2", "text LIKE 'a%'", "at IS NULL AND month in (1, 2)",
)  # fmt: skip


def check_conditions(sql: Sql, spark: SparkSession, lake: Lakehouse, conditions: Sequence[str]) -> None:
    """Compare the rows that match each condition with the rows that are read without the catalog, in one query."""
    spark.read.format("trinitylake").option("root", lake.root).option("version", 4).load(
        "facts.days"
    ).createOrReplaceTempView("plain_days")

    def matching_rows(table: str) -> list[tuple[Any, ...]]:
        queries = (f"SELECT {n} AS n, id FROM {table} WHERE {condition}" for n, condition in enumerate(conditions))
        return sorted(sql(" UNION ALL ".join(queries)))

    expected = matching_rows("plain_days")
    assert {row[0] for row in expected} == set(range(len(conditions)))
    assert matching_rows("lake.facts.days VERSION AS OF 4") == expected


@pytest.mark.soak
def test_all_conditions_return_matching_rows(sql: Sql, spark: SparkSession, lake: Lakehouse) -> None:
    check_conditions(sql, spark, lake, CONDITIONS)


def test_conditions_and_columns_are_pushed_down(sql: Sql, spark: SparkSession, lake: Lakehouse) -> None:
    check_conditions(sql, spark, lake, CONDITIONS[::5])
    ((plan,),) = sql("EXPLAIN SELECT text FROM lake.facts.days WHERE month = 1 AND share > 0 AND text = 'a'")
    filters = '"month" is not null, "text" is not null, "month" = 1, "text" = '
    assert f"columns text, month, share, row_filter [{filters}" in plan
    query = "SELECT count(*) FROM lake.facts.days WITH (`row_filter` = 'id < 3') WHERE id > 1 AND month < 9"
    assert sql(query) == [(1,)]


def test_only_matching_files_are_read(sql: Sql, lake: Lakehouse) -> None:
    (path,) = [
        row[0] for row in sql("SELECT path FROM lake.files VERSION AS OF 4 WHERE kind = 'data'") if "month=3" in row[0]
    ]
    file = Path(lake.root.removeprefix("file://")) / path
    renamed = file.rename(file.with_suffix(".hidden"))
    try:
        assert ids(sql, "VERSION AS OF 4 WHERE month < 3") == [1, 2, 3]
    finally:
        renamed.rename(file)


@pytest.mark.soak
def test_data_frames_write_through_catalog(spark: SparkSession, sql: Sql, lake: Lakehouse) -> None:
    rows = spark.range(20, 22).selectExpr("CAST(id AS INT) AS id", "9 AS month")
    before = lake.latest_version()
    for _ in range(2):  # the second write detects the commit of the first write
        rows.writeTo("lake.facts.days").option("run_id", "a run").append()
        assert lake.latest_version() == before + 1
    assert ids(sql, "WHERE month = 9") == [20, 21]
    rows.limit(1).writeTo("lake.facts.days").overwritePartitions()
    assert ids(sql, "WHERE month = 9") == [20]
    for condition, message in (
        (F.col("text") == "a", "needs a value for each of month"),
        (F.col("month") == 3, "rows belong to partition"),
    ):
        with pytest.raises(InvalidInputError, match=message), spark_failures("write"):
            rows.writeTo("lake.facts.days").overwrite(condition)
    writer = rows.write.format("trinitylake").option("root", lake.root).option("create", "true").mode("append")
    with pytest.raises(errors.ObjectExistsError, match=r"facts\.days"), spark_failures("write"):
        writer.save("facts.days")


def test_each_statement_commits_one_version(sql: Sql, spark: SparkSession, tmp_path: Path) -> None:
    lake = new_lake(spark, tmp_path, "statements")
    statements = (
        "CREATE NAMESPACE statements.a",
        "ALTER NAMESPACE statements.a SET PROPERTIES ('k' = 'v', 'comment' = 'c')",
        "ALTER NAMESPACE statements.a UNSET PROPERTIES ('k')",
        "CREATE TABLE statements.a.t PARTITIONED BY (part) AS SELECT id, id % 3 AS part FROM range(6)",
        "INSERT OVERWRITE statements.a.t PARTITION (part = 1) VALUES (10L)",
        "INSERT OVERWRITE statements.a.t SELECT id + 100, 2L FROM statements.a.t WHERE part = 2",
        "ALTER TABLE statements.a.t ADD COLUMNS (note STRING COMMENT 'why' AFTER id, s STRUCT<x: INT>)",
        "ALTER TABLE statements.a.t ADD COLUMN s.y BIGINT FIRST",
        "ALTER TABLE statements.a.t RENAME COLUMN note TO reason",
        "ALTER TABLE statements.a.t ALTER COLUMN reason COMMENT 'because'",
        "ALTER TABLE statements.a.t ALTER COLUMN reason FIRST",
        "ALTER TABLE statements.a.t ALTER COLUMN s.x TYPE BIGINT",
        "ALTER TABLE statements.a.t DROP COLUMN s",
        "ALTER TABLE statements.a.t SET TBLPROPERTIES ('x' = 'y', 'z' = '1')",
        "ALTER TABLE statements.a.t UNSET TBLPROPERTIES ('z')",
        "CREATE NAMESPACE statements.b",
        "ALTER TABLE statements.a.t RENAME TO statements.b.u",
    )
    for number, statement in enumerate(statements, 1):
        assert sql(statement) == []
        assert lake.latest_version() == number, statement
        if "part = 1" in statement:
            assert sorted(sql("SELECT * FROM statements.a.t")) == [(0, 0), (2, 2), (3, 0), (5, 2), (10, 1)]
    assert sql("DESCRIBE TABLE statements.b.u")[:3] == [
        ("reason", "string", "because"), ("id", "bigint", None), ("part", "bigint", None),
    ]  # fmt: skip
    assert sorted(sql("SELECT * FROM statements.b.u")) == [(None, 102, 2), (None, 105, 2)]
    assert ("Comment", "c") in sql("DESCRIBE NAMESPACE statements.a")
    assert sql("SHOW TBLPROPERTIES statements.b.u ('x')") == [("x", "y")]
    spark.conf.set("spark.sql.sources.partitionOverwriteMode", "dynamic")
    try:
        sql("INSERT OVERWRITE statements.b.u VALUES ('new', 7L, 1L)")
    finally:
        spark.conf.unset("spark.sql.sources.partitionOverwriteMode")
    assert sorted(row[1] for row in sql("SELECT * FROM statements.b.u")) == [7, 102, 105]
    assert sql("SHOW TABLES IN statements.a") == []
    sql("DROP NAMESPACE statements.a")
    sql("DROP NAMESPACE statements.b CASCADE")
    assert sql("SHOW NAMESPACES IN statements") == []
    check_lake(lake)


def test_names_with_dots(sql: Sql, spark: SparkSession, tmp_path: Path) -> None:
    """The names of both tables are equal if the namespace and the table are joined by a dot."""
    lake = new_lake(spark, tmp_path, "dotted")
    for namespace, table, number in (("a", "b.c", 1), ("a.b", "c", 2)):
        name = f"dotted.`{namespace}`.`{table}`"
        sql(f"CREATE NAMESPACE dotted.`{namespace}`")
        sql(f"CREATE TABLE {name} (id INT) USING parquet")
        sql(f"INSERT INTO {name} VALUES ({number})")
        assert sql(f"SELECT id FROM {name}") == [(number,)]
    sql("CREATE TABLE dotted.`a.b`.`x.y` AS SELECT * FROM dotted.a.`b.c`")
    assert sql("SELECT id FROM dotted.`a.b`.`x.y` UNION ALL SELECT id FROM dotted.`a.b`.c ORDER BY 1") == [(1,), (2,)]
    check_lake(lake)


def test_spark_writers_create_tables(sql: Sql, spark: SparkSession, tmp_path: Path) -> None:
    """The writers pass the default format of the session, although the user did not choose a format."""
    lake = new_lake(spark, tmp_path / "lake", "writers")
    sql("CREATE NAMESPACE writers.ns")
    spark.range(3).write.saveAsTable("writers.ns.saved")
    stream = spark.readStream.table("writers.ns.saved").writeStream.option("stream_id", "s")
    stream = stream.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True)
    stream.toTable("writers.ns.streamed").awaitTermination()
    assert sql("SELECT count(*) FROM writers.ns.streamed") == [(3,)]
    check_lake(lake)


def test_overwrite_of_serializable_lakehouse_requires_reads(sql: Sql, spark: SparkSession, tmp_path: Path) -> None:
    lake = Lakehouse.create(f"file://{tmp_path}/", OPTIONS, isolation_level=IsolationLevel.SERIALIZABLE)
    register_catalog(spark, "strict", lake.root, OPTIONS)
    sql("CREATE NAMESPACE strict.ns")
    sql("CREATE TABLE strict.ns.a AS SELECT 1 AS id")
    with pytest.raises(InvalidInputError), spark_failures("overwrite"):
        sql("INSERT OVERWRITE strict.ns.a SELECT id + 1 FROM strict.ns.a")
    reads = f"""WITH (reads = '{{"ns.a": {lake.latest_version()}}}')"""
    sql(f"INSERT OVERWRITE strict.ns.a {reads} SELECT id + 1 FROM strict.ns.a")
    with pytest.raises(CommitConflictError), spark_failures("overwrite"):
        sql(f"INSERT OVERWRITE strict.ns.a {reads} SELECT id + 1 FROM strict.ns.a")
    assert sql("SELECT id FROM strict.ns.a") == [(2,)]


REJECTED = (
    ("SELECT * FROM lake.facts.days VERSION AS OF 99", "VersionNotFoundError", "version 99 does not exist"),
    ("SELECT * FROM lake.facts.days VERSION AS OF 'none'", "ExportNotFoundError", "there is no export 'none'"),
    ("SELECT * FROM lake.facts.days VERSION AS OF 1", "TableNotFoundError", "there is no table facts.days"),
    ("SELECT * FROM lake.facts.days TIMESTAMP AS OF '2001-01-01'", "VersionNotFoundError", "no version is as old"),
    ("SELECT * FROM lake.facts.days WITH (`version` = '3')", "InvalidInputError", "option 'version'"),
    ("SELECT * FROM lake.facts.days WITH (`row_filter` = 'none = 3')", "InvalidInputError", "none = 3"),
    ("SELECT * FROM lake.exports VERSION AS OF 3", "InvalidInputError", "option 'version'"),
    ("CREATE TABLE lake.facts.x (id VARCHAR(3))", "UnsupportedTypeError", "cast it to string"),
    ("CREATE TABLE lake.facts.x (id INT) USING orc", "InvalidInputError", "USING"),
    ("CREATE TABLE lake.facts.x (id INT) LOCATION '/tmp/x'", "InvalidInputError", "LOCATION"),
    ("CREATE TABLE lake.facts.x (at TIMESTAMP) PARTITIONED BY (days(at))", "InvalidInputError", "days of 'at'"),
    ("CREATE TABLE lake.facts.x (f FLOAT) PARTITIONED BY (f)", "InvalidDefinitionError", "that is not a float"),
    (
        "CREATE TABLE lake.facts.x TBLPROPERTIES ('write.location-provider.impl' = 'x') AS SELECT 1 AS i",
        "InvalidInputError",
        "COMMENT",
    ),
    (
        "CREATE TABLE lake.facts.x (i INT) TBLPROPERTIES ('write.py-location-provider.impl' = 'x')",
        "InvalidDefinitionError",
        "impl",
    ),
    ("CREATE OR REPLACE TABLE lake.facts.days AS SELECT 1 AS i", "InvalidInputError", "REPLACE TABLE"),
    ("CREATE NAMESPACE lake.facts.inner", "InvalidInputError", "facts.inner"),
    ("CREATE NAMESPACE lake.x LOCATION '/tmp/x'", "InvalidInputError", "LOCATION"),
    ("ALTER TABLE lake.facts.days ADD COLUMN x INT NOT NULL", "InvalidInputError", "cannot be NOT NULL"),
    ("ALTER TABLE lake.facts.days SET LOCATION '/tmp/x'", "InvalidInputError", "location"),
    ("ALTER TABLE lake.facts.days DROP COLUMN month", "InvalidDefinitionError", "month"),
    ("DROP NAMESPACE lake.facts", "NamespaceNotEmptyError", "contains 1 tables"),
    ("DROP TABLE lake.facts.days PURGE", "InvalidInputError", "PURGE"),
)


def test_errors_are_one_line_with_their_class(sql: Sql, lake: Lakehouse) -> None:
    before = lake.latest_version()
    unexpected = []
    for statement, name, reason in REJECTED:
        with pytest.raises(PySparkException) as raised:
            sql(statement)
        message = str(raised.value)
        with pytest.raises(TrinityLakeError) as translated, spark_failures("run it"):
            raise raised.value
        is_one_line = message.startswith(f"{name}: ") and len(message.splitlines()) == 1
        if not is_one_line or reason not in message or type(translated.value) is not getattr(errors, name):
            unexpected.append((statement, message, translated.value))
    assert unexpected == []
    assert lake.latest_version() == before


def test_spark_rejects_statements(sql: Sql, lake: Lakehouse) -> None:
    before = lake.latest_version()
    for statement, condition in (
        ("SELECT * FROM lake.facts.none", "TABLE_OR_VIEW_NOT_FOUND"),
        ("SELECT * FROM lake.facts.days.deeper", "TABLE_OR_VIEW_NOT_FOUND"),
        ("SHOW TABLES IN lake.none", "SCHEMA_NOT_FOUND"),
        ("CREATE TABLE lake.none.x (id INT)", "SCHEMA_NOT_FOUND"),
        ("CREATE TABLE lake.none.x AS SELECT 1 AS i", "SCHEMA_NOT_FOUND"),
        ("CREATE TABLE lake.facts.days (id INT)", "TABLE_OR_VIEW_ALREADY_EXISTS"),
        ("CREATE TABLE lake.facts.days AS SELECT 1 AS i", "TABLE_OR_VIEW_ALREADY_EXISTS"),
        ("CREATE NAMESPACE lake.facts", "SCHEMA_ALREADY_EXISTS"),
        ("CREATE VIEW lake.facts.v AS SELECT 1", "MISSING_CATALOG_ABILITY.VIEWS"),
        ("INSERT INTO lake.versions SELECT * FROM lake.versions", "UNSUPPORTED_FEATURE.TABLE_OPERATION"),
        ("UPDATE lake.facts.days SET id = 3", "UNSUPPORTED_FEATURE.TABLE_OPERATION"),
    ):
        with pytest.raises(PySparkException) as raised:
            sql(statement)
        assert raised.value.getCondition() == condition, statement
    assert lake.latest_version() == before


def test_catalog_name_belongs_to_one_lakehouse(spark: SparkSession, lake: Lakehouse, tmp_path: Path) -> None:
    register_catalog(spark, "lake", lake.root, OPTIONS)  # registering it again is allowed
    with pytest.raises(InvalidInputError, match="'lake'"):
        register_catalog(spark, "lake", f"file://{tmp_path}/")
    for name in ("spark_catalog", "a.b", "", "system"):
        with pytest.raises(InvalidInputError):
            register_catalog(spark, name, lake.root)
    with pytest.raises(InvalidInputError, match="'secret_access_key'"):
        catalog_settings("x", "s3://b/p/", {"secret_access_key": "planted"})


def test_unknown_settings_are_rejected(spark: SparkSession, sql: Sql, lake: Lakehouse) -> None:
    for key, value in catalog_settings("mistaken", lake.root, OPTIONS).items():
        spark.conf.set(key, value)
    spark.conf.set("spark.sql.catalog.mistaken.version", "3")
    with pytest.raises(PySparkException, match=r"InvalidInputError: .*'version'"):
        sql("SHOW NAMESPACES IN mistaken")


@pytest.mark.soak
def test_streams_continue_from_checkpoint(spark: SparkSession, sql: Sql, tmp_path: Path) -> None:
    lake = new_lake(spark, tmp_path / "lake", "streams")
    sql("CREATE NAMESPACE streams.a")
    sql("CREATE TABLE streams.a.t AS SELECT id, id * 2 AS twice FROM range(3)")
    sql("CREATE TABLE streams.a.copy (twice BIGINT)")
    for count in (3, 5):
        stream = spark.readStream.table("streams.a.t").select("twice").writeStream.option("stream_id", "copy")
        stream = stream.option("checkpointLocation", f"{tmp_path}/checkpoint").trigger(availableNow=True)
        stream.toTable("streams.a.copy").awaitTermination(120)
        assert len(sql("SELECT * FROM streams.a.copy")) == count
        sql("INSERT INTO streams.a.t VALUES (7, 70), (8, 80)")
    check_lake(lake)


def test_documented_statements_run(spark: SparkSession, sql: Sql, tmp_path: Path) -> None:
    """Run the statements of the page in order, with the catalogs that the page refers to."""
    lake = Lakehouse.create(f"file://{tmp_path}/docs/", OPTIONS)
    other = Lakehouse.create(f"file://{tmp_path}/other/", OPTIONS)
    scope = {"root": lake.root, "other_root": other.root, "spark": spark}
    snippets_text = DOCS.read_text().replace('"lake"', '"docs"').replace("lake.", "docs.")
    for kind, text in re.findall(r"^```(python|sql)\n(.*?)^```", snippets_text, re.MULTILINE | re.DOTALL):
        if kind == "python":
            if "VERSION AS OF 99" in text:
                code, _, message = text.rstrip().rpartition("\n# ")
                with pytest.raises(PySparkException) as raised:
                    exec(code, scope)
                assert message == f"{type(raised.value).__name__}: {raised.value}"
            else:
                exec(text.replace("build_session()", "spark"), scope)
            continue
        for statement in filter(None, map(str.strip, text.split(";\n"))):
            sql(statement.removesuffix(";"))
    assert lake.latest_version() == 14
    ((table_definition,),) = sql("SHOW CREATE TABLE docs.facts.flights")
    assert "PARTITIONED BY" in table_definition
    check_lake(lake)
