package trinitylake.spark;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import org.apache.spark.sql.catalyst.analysis.NamespaceAlreadyExistsException;
import org.apache.spark.sql.catalyst.analysis.NoSuchNamespaceException;
import org.apache.spark.sql.catalyst.analysis.NoSuchTableException;
import org.apache.spark.sql.catalyst.analysis.NonEmptyNamespaceException;
import org.apache.spark.sql.catalyst.analysis.TableAlreadyExistsException;
import org.apache.spark.sql.connector.catalog.Column;
import org.apache.spark.sql.connector.catalog.Identifier;
import org.apache.spark.sql.connector.catalog.NamespaceChange;
import org.apache.spark.sql.connector.catalog.StagedTable;
import org.apache.spark.sql.connector.catalog.StagingTableCatalog;
import org.apache.spark.sql.connector.catalog.SupportsNamespaces;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableChange;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * The tables of a lakehouse in Spark's SQL. The format is implemented in Python only: each call is a request to Python,
 * and rows are read and written by the data source "trinitylake". Metadata tables have no namespace, for example
 * {@code lake.versions}.
 */
public final class TrinityLakeCatalog implements StagingTableCatalog, SupportsNamespaces {
  private String name;
  private PythonCatalog python;

  @Override
  public void initialize(String name, CaseInsensitiveStringMap options) {
    this.name = name;
    this.python = new PythonCatalog(options.asCaseSensitiveMap());
  }

  @Override
  public String name() {
    return name;
  }

  // Tables

  @Override
  public Identifier[] listTables(String[] namespace) throws NoSuchNamespaceException {
    ObjectNode request = python.request("list_tables");
    Json.put(request, "namespace", namespace);
    Response response = python.send(request);
    if (response.is("no such namespace")) {
      throw new NoSuchNamespaceException(qualified(namespace));
    }
    List<Identifier> tables = new ArrayList<>();
    response.value().forEach(table -> tables.add(Identifier.of(namespace, table.textValue())));
    return tables.toArray(new Identifier[0]);
  }

  @Override
  public Table loadTable(Identifier table) throws NoSuchTableException {
    return load(table, "latest", null);
  }

  @Override
  public Table loadTable(Identifier table, String version) throws NoSuchTableException {
    return load(table, "version", version);
  }

  /** Loads a table at a time in microseconds since the epoch. Versions have times in milliseconds. */
  @Override
  public Table loadTable(Identifier table, long microseconds) throws NoSuchTableException {
    return load(table, "timestamp", Long.toString(Math.floorDiv(microseconds, 1000L)));
  }

  private Table load(Identifier table, String time, String value) throws NoSuchTableException {
    ObjectNode request = python.request("load_table");
    Json.put(request, "table", table);
    request.put("time", time);
    request.put("value", value);
    Response response = python.send(request);
    if (response.is("no such table")) {
      throw new NoSuchTableException(qualified(table));
    }
    return new LakehouseTable(qualifiedName(table), python, response.schema(), response.value());
  }

  @Override
  public Table createTable(Identifier table, Column[] columns, Transform[] partitions, Map<String, String> properties)
      throws TableAlreadyExistsException, NoSuchNamespaceException {
    Response response = python.send(creation("create_table", table, columns, partitions, properties));
    check(response, table);
    return new LakehouseTable(qualifiedName(table), python, response.schema(), response.value());
  }

  private ObjectNode creation(
      String what, Identifier table, Column[] columns, Transform[] partitions, Map<String, String> properties) {
    ObjectNode request = python.request(what);
    Json.put(request, "table", table);
    Json.put(request, "columns", columns);
    Json.put(request, "partitions", partitions);
    Json.put(request, "properties", properties);
    return request;
  }

  private void check(Response response, Identifier table) throws TableAlreadyExistsException, NoSuchNamespaceException {
    if (response.is("table exists")) {
      throw new TableAlreadyExistsException(qualified(table));
    }
    if (response.is("no such namespace")) {
      throw new NoSuchNamespaceException(qualified(table.namespace()));
    }
  }

  @Override
  public Table alterTable(Identifier table, TableChange... changes) throws NoSuchTableException {
    ObjectNode request = python.request("alter_table");
    Json.put(request, "table", table);
    ArrayNode list = request.putArray("changes");
    for (TableChange change : changes) {
      list.add(Json.of(change));
    }
    Response response = python.send(request);
    if (response.is("no such table")) {
      throw new NoSuchTableException(qualified(table));
    }
    return new LakehouseTable(qualifiedName(table), python, response.schema(), response.value());
  }

  @Override
  public boolean dropTable(Identifier table) {
    ObjectNode request = python.request("drop_table");
    Json.put(request, "table", table);
    return !python.send(request).is("no such table");
  }

  @Override
  public boolean purgeTable(Identifier table) {
    throw new LakehouseException(
        "InvalidInputError: DROP TABLE ... PURGE is not supported, because older versions still need the files; omit"
            + " PURGE, then expire and purge versions of the lakehouse");
  }

  @Override
  public void renameTable(Identifier from, Identifier to) throws NoSuchTableException, TableAlreadyExistsException {
    ObjectNode request = python.request("rename_table");
    Json.put(request, "table", from);
    Json.put(request, "to", withoutCatalog(to));
    Response response = python.send(request);
    if (response.is("no such table")) {
      throw new NoSuchTableException(qualified(from));
    }
    if (response.is("table exists")) {
      throw new TableAlreadyExistsException(qualified(to));
    }
    response.value();
  }

  // CREATE TABLE ... AS SELECT is one version: the write creates the table.

  @Override
  public StagedTable stageCreate(
      Identifier table, Column[] columns, Transform[] partitions, Map<String, String> properties)
      throws TableAlreadyExistsException, NoSuchNamespaceException {
    Response response = python.send(creation("stage_table", table, columns, partitions, properties));
    check(response, table);
    return new StagedLakehouseTable(qualifiedName(table), python, response.schema(), response.value());
  }

  @Override
  public StagedTable stageReplace(
      Identifier table, Column[] columns, Transform[] partitions, Map<String, String> properties) {
    throw unsupportedReplace();
  }

  @Override
  public StagedTable stageCreateOrReplace(
      Identifier table, Column[] columns, Transform[] partitions, Map<String, String> properties) {
    throw unsupportedReplace();
  }

  private static LakehouseException unsupportedReplace() {
    return new LakehouseException(
        "InvalidInputError: REPLACE TABLE is not supported; use INSERT OVERWRITE to replace a table's rows, and ALTER"
            + " TABLE to change its columns");
  }

  // Namespaces

  @Override
  public String[][] listNamespaces() {
    List<String[]> names = new ArrayList<>();
    for (JsonNode namespace : python.send(python.request("list_namespaces")).value()) {
      names.add(new String[] {namespace.textValue()});
    }
    return names.toArray(new String[0][]);
  }

  @Override
  public String[][] listNamespaces(String[] namespace) throws NoSuchNamespaceException {
    if (namespace.length == 0) {
      return listNamespaces();
    }
    loadNamespaceMetadata(namespace);
    return new String[0][]; // namespaces are not nested
  }

  @Override
  public Map<String, String> loadNamespaceMetadata(String[] namespace) throws NoSuchNamespaceException {
    return Json.strings(changed(namespace, python.request("load_namespace")));
  }

  @Override
  public void createNamespace(String[] namespace, Map<String, String> properties)
      throws NamespaceAlreadyExistsException {
    ObjectNode request = python.request("create_namespace");
    Json.put(request, "namespace", namespace);
    Json.put(request, "properties", properties);
    Response response = python.send(request);
    if (response.is("namespace exists")) {
      throw new NamespaceAlreadyExistsException(qualified(namespace));
    }
    response.value();
  }

  @Override
  public void alterNamespace(String[] namespace, NamespaceChange... changes) throws NoSuchNamespaceException {
    ObjectNode request = python.request("alter_namespace");
    ObjectNode updates = request.putObject("updates");
    ArrayNode removals = request.putArray("removals");
    for (NamespaceChange change : changes) {
      if (change instanceof NamespaceChange.SetProperty) {
        NamespaceChange.SetProperty set = (NamespaceChange.SetProperty) change;
        updates.put(set.property(), set.value());
      } else if (change instanceof NamespaceChange.RemoveProperty) {
        removals.add(((NamespaceChange.RemoveProperty) change).property());
      } else {
        throw new UnsupportedOperationException("namespace change " + change + " is not supported");
      }
    }
    changed(namespace, request);
  }

  @Override
  public boolean dropNamespace(String[] namespace, boolean cascade)
      throws NoSuchNamespaceException, NonEmptyNamespaceException {
    ObjectNode request = python.request("drop_namespace");
    request.put("cascade", cascade);
    changed(namespace, request);
    return true;
  }

  private JsonNode changed(String[] namespace, ObjectNode request) throws NoSuchNamespaceException {
    Json.put(request, "namespace", namespace);
    Response response = python.send(request);
    if (response.is("no such namespace")) {
      throw new NoSuchNamespaceException(qualified(namespace));
    }
    return response.value();
  }

  /** Removes the catalog's name, which Spark includes in the new name of a table. */
  private Identifier withoutCatalog(Identifier table) {
    String[] namespace = table.namespace();
    boolean hasCatalog = namespace.length == 2 && namespace[0].equals(name);
    return hasCatalog ? Identifier.of(new String[] {namespace[1]}, table.name()) : table;
  }

  // Names that include the catalog's, for messages

  private String[] qualified(String[] namespace) {
    String[] parts = new String[namespace.length + 1];
    parts[0] = name;
    System.arraycopy(namespace, 0, parts, 1, namespace.length);
    return parts;
  }

  private Identifier qualified(Identifier table) {
    return Identifier.of(qualified(table.namespace()), table.name());
  }

  private String qualifiedName(Identifier table) {
    return String.join(".", qualified(table.namespace())) + "." + table.name();
  }
}
