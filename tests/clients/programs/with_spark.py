"""Spark with Iceberg's Java runtime: read, write, change rows, read earlier versions, and fail to delete files."""

import json
import sys

from pyspark.sql import SparkSession

url, jars, folder, *options = sys.argv[1:]
settings = {
    "spark.jars": jars,
    "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.warehouse.dir": folder,
}
for name, warehouse in (("lake", "main"), ("earlier", "v3")):
    settings |= {
        f"spark.sql.catalog.{name}": "org.apache.iceberg.spark.SparkCatalog",
        f"spark.sql.catalog.{name}.type": "rest",
        f"spark.sql.catalog.{name}.uri": url,
        f"spark.sql.catalog.{name}.warehouse": warehouse,
    }
    settings |= {
        f"spark.sql.catalog.{name}.{key}": value for key, _, value in (option.partition("=") for option in options)
    }
builder = SparkSession.builder.master("local[1]")
for name, value in settings.items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
spark.sparkContext.setLogLevel("ERROR")


def count(table: str) -> int:
    return spark.sql(f"SELECT count(*) FROM {table}").collect()[0][0]


def error_of(statement: str) -> str:
    try:
        spark.sql(statement).collect()
    except Exception as error:  # noqa: BLE001 - the test checks its message
        return "\n".join(line for line in str(error).splitlines() if not line.startswith("\tat "))
    return "none"


orders = "lake.sales.orders"
result = {"before": count(orders), "earlier": count("earlier.sales.orders")}
snapshots = f"SELECT snapshot_id, committed_at FROM {orders}.snapshots ORDER BY committed_at"
first, committed_at = spark.sql(snapshots).collect()[0]
spark.sql(f"INSERT INTO {orders} VALUES (3, 7.0)")
spark.sql(f"UPDATE {orders} SET amount = 1.0 WHERE id = 1")
spark.sql(
    f"MERGE INTO {orders} t USING (SELECT 3L AS id, 8.0D AS amount UNION ALL SELECT 4L, 9.0D) s ON t.id = s.id"
    " WHEN MATCHED THEN UPDATE SET t.amount = s.amount WHEN NOT MATCHED THEN INSERT *"
)
result["merged"] = sorted(tuple(row) for row in spark.sql(f"SELECT id, amount FROM {orders}").collect())
result["snapshot"] = count(f"{orders} VERSION AS OF {first}")
result["timestamp"] = count(f"{orders} TIMESTAMP AS OF '{committed_at}'")
spark.sql(
    "CREATE TABLE lake.sales.of_spark (id BIGINT, part INT) USING iceberg PARTITIONED BY (part)"
    " TBLPROPERTIES ('format-version' = '2', 'write.delete.mode' = 'merge-on-read')"
)
spark.sql("INSERT INTO lake.sales.of_spark SELECT /*+ COALESCE(1) */ id, CAST(id % 2 AS INT) FROM range(10)")
spark.sql("DELETE FROM lake.sales.of_spark WHERE id = 4")
spark.sql("ALTER TABLE lake.sales.of_spark ADD COLUMN note STRING")
spark.sql("ALTER TABLE lake.sales.of_spark CREATE BRANCH tests")
spark.sql("INSERT INTO lake.sales.of_spark.branch_tests VALUES (99, 1, 'on a branch')")
result["deletes"] = spark.sql("SELECT count(*) FROM lake.sales.of_spark.delete_files").collect()[0][0]
result["created"] = [count("lake.sales.of_spark"), count("lake.sales.of_spark VERSION AS OF 'tests'")]
spark.sql("CREATE TABLE lake.sales.copied USING iceberg AS SELECT * FROM lake.sales.of_spark")
spark.sql("CALL lake.system.rewrite_data_files(table => 'sales.copied', options => map('rewrite-all', 'true'))")
result["copied"] = count("lake.sales.copied")
spark.sql("CREATE VIEW lake.sales.late AS SELECT id FROM lake.sales.orders WHERE amount > 8")
result["view"] = count("lake.sales.late")
spark.sql("DROP VIEW lake.sales.late")
result["purge"] = error_of("DROP TABLE lake.sales.copied PURGE")
spark.sql("DROP TABLE lake.sales.copied")
result["tables"] = sorted(row.tableName for row in spark.sql("SHOW TABLES IN lake.sales").collect())
result["expire"] = error_of("CALL lake.system.expire_snapshots(table => 'sales.orders', retain_last => 1)")
result["orphans"] = error_of("CALL lake.system.remove_orphan_files(table => 'sales.orders')")
result["write"] = error_of("INSERT INTO earlier.sales.orders VALUES (3, 7.0)")
result["missing"] = error_of("SELECT * FROM lake.sales.nothing")
result["after"] = [count(orders), count("earlier.sales.orders")]
print(json.dumps(result))
