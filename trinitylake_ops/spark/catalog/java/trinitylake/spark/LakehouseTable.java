package trinitylake.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.EnumSet;
import java.util.Map;
import java.util.Objects;
import java.util.Set;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.SupportsWrite;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.write.LogicalWriteInfo;
import org.apache.spark.sql.connector.write.WriteBuilder;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * A table at a version, which is by default the latest one when the table is loaded. Queries read that version, however
 * late they run. Writes are committed on top of the latest version.
 */
class LakehouseTable implements SupportsRead, SupportsWrite {
  private final String name;
  private final PythonCatalog python;
  private final StructType schema;
  private final JsonNode described;

  /** {@code described} is the response of Python to load_table. */
  LakehouseTable(String name, PythonCatalog python, StructType schema, JsonNode described) {
    this.name = name;
    this.python = python;
    this.schema = schema;
    this.described = described;
  }

  @Override
  public String name() {
    return name;
  }

  @Override
  public StructType schema() {
    return schema;
  }

  @Override
  public Transform[] partitioning() {
    return Json.transforms(described.get("partitions"));
  }

  @Override
  public Map<String, String> properties() {
    return Json.strings(described.get("properties"));
  }

  @Override
  public Set<TableCapability> capabilities() {
    Set<TableCapability> reads = EnumSet.of(TableCapability.BATCH_READ, TableCapability.MICRO_BATCH_READ);
    if (described.get("is_writable").booleanValue()) {
      reads.addAll(EnumSet.of(
          TableCapability.BATCH_WRITE,
          TableCapability.STREAMING_WRITE,
          TableCapability.TRUNCATE,
          TableCapability.OVERWRITE_BY_FILTER,
          TableCapability.OVERWRITE_DYNAMIC));
    }
    return reads;
  }

  /** Tables are equal only at the same version, so that Spark reuses cached data of the same version only. */
  @Override
  public boolean equals(Object other) {
    return other instanceof LakehouseTable
        && name.equals(((LakehouseTable) other).name)
        && schema.equals(((LakehouseTable) other).schema)
        && described.equals(((LakehouseTable) other).described);
  }

  @Override
  public int hashCode() {
    return Objects.hash(name, schema, described);
  }

  @Override
  public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
    return new LakehouseScanBuilder(new ScanOptions(python, described, options), schema);
  }

  @Override
  public WriteBuilder newWriteBuilder(LogicalWriteInfo info) {
    return new LakehouseWriteBuilder(python, info, Json.strings(described.get("write_options")));
  }
}
