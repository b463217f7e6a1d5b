// iceberg-js lists, makes, loads and drops tables, and is refused in an earlier version.
import { createRequire } from "node:module";

const [, , url, modules] = process.argv;
const { IcebergRestCatalog } = createRequire(`${modules}/`)("iceberg-js");
const at = (name) => new IcebergRestCatalog({ baseUrl: url, warehouse: name, catalogName: name });
const orders = { namespace: ["sales"], name: "orders" };
const schema = {
  type: "struct",
  "schema-id": 0,
  fields: [{ id: 1, name: "id", type: "long", required: false }],
};
const found = { namespaces: await at("main").listNamespaces() };
await at("main").createTable({ namespace: ["sales"] }, { name: "of_js", schema });
found.tables = (await at("main").listTables({ namespace: ["sales"] })).map((one) => one.name);
found.now = (await at("main").loadTable(orders)).snapshots.length;
found.then = (await at("v3").loadTable(orders)).snapshots.length;
try {
  await at("v3").dropTable(orders);
} catch (error) {
  found.error = [error.name, error.status];
}
await at("main").dropTable({ namespace: ["sales"], name: "of_js" });
console.log(JSON.stringify(found));
