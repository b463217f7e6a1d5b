package trinitylake.spark;

import com.fasterxml.jackson.databind.JsonNode;
import org.apache.spark.sql.connector.catalog.StagedTable;
import org.apache.spark.sql.types.StructType;

/** A table of CREATE TABLE ... AS SELECT. The commit of its rows creates it, so nothing is left to do afterwards. */
final class StagedLakehouseTable extends LakehouseTable implements StagedTable {
  StagedLakehouseTable(String name, PythonCatalog python, StructType schema, JsonNode described) {
    super(name, python, schema, described);
  }

  @Override
  public void commitStagedChanges() {}

  @Override
  public void abortStagedChanges() {}
}
