// iceberg-js: list, create, load and drop tables, and fail to write to an earlier version.
import { createRequire } from "node:module";

const [, , url, modules] = process.argv;
const { IcebergRestCatalog } = createRequire(`${modules}/`)("iceberg-js");
const catalog = (name) => new IcebergRestCatalog({ baseUrl: url, warehouse: name, catalogName: name });
const orders = { namespace: ["sales"], name: "orders" };
const schema = {
  type: "struct",
  "schema-id": 0,
  fields: [{ id: 1, name: "id", type: "long", required: false }],
};
const result = { namespaces: await catalog("main").listNamespaces() };
await catalog("main").createTable({ namespace: ["sales"] }, { name: "of_js", schema });
result.tables = (await catalog("main").listTables({ namespace: ["sales"] })).map((table) => table.name);
result.latest = (await catalog("main").loadTable(orders)).snapshots.length;
result.earlier = (await catalog("v3").loadTable(orders)).snapshots.length;
try {
  await catalog("v3").dropTable(orders);
} catch (error) {
  result.error = [error.name, error.status];
}
await catalog("main").dropTable({ namespace: ["sales"], name: "of_js" });
console.log(JSON.stringify(result));
