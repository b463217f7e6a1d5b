"""ClickHouse in chdb: list, read and write, read an earlier version, and fail to write to it."""

import json
import sys

from chdb import session

url, *keys = sys.argv[1:]
engine = session.Session()
engine.query("SET allow_experimental_database_iceberg = 1, allow_insert_into_iceberg = 1")
arguments, settings = f"'{url}/v1'", "catalog_type = 'rest'"
if keys:
    endpoint, key, secret = keys
    arguments += f", '{key}', '{secret}'"
    settings += f", storage_endpoint = '{endpoint}', vended_credentials = 0"
for name, warehouse in (("lake", "main"), ("earlier", "v3")):
    engine.query(
        f"CREATE DATABASE {name} ENGINE = DataLakeCatalog({arguments}) SETTINGS {settings}, warehouse = '{warehouse}'"
    )


def rows(statement: str) -> list[str]:
    return str(engine.query(statement, "CSV")).split()


result = {
    "tables": rows("SHOW TABLES FROM lake"),
    "before": rows("SELECT count(*), sum(amount) FROM lake.`sales.orders`"),
}
engine.query("INSERT INTO lake.`sales.orders` VALUES (7, 7.5)")
result["latest"] = rows("SELECT id FROM lake.`sales.orders` WHERE amount < 9 ORDER BY id")
result["earlier"] = rows("SELECT count(*) FROM earlier.`sales.orders`")
try:
    engine.query("INSERT INTO earlier.`sales.orders` VALUES (7, 7.5)")
except Exception as error:  # noqa: BLE001 - the test checks its message
    result["error"] = str(error)[:600]
result["earlier_after_insert"] = rows("SELECT count(*) FROM earlier.`sales.orders`")
print(json.dumps(result))
