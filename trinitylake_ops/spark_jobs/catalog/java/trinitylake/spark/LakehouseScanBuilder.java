package trinitylake.spark;

import java.util.HashMap;
import java.util.LinkedHashSet;
import java.util.Map;
import java.util.Set;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.TableProvider;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.connector.metric.CustomMetric;
import org.apache.spark.sql.connector.read.Batch;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.SupportsPushDownRequiredColumns;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * Plans a scan by the data source. It tells the source which columns a query needs, which Spark does not tell a source
 * of Python. Each scan has a source of its own, so no scan gets what was planned for another.
 */
final class LakehouseScanBuilder implements SupportsPushDownRequiredColumns {
  private final PythonCatalog python;
  private final StructType schema;
  private final Map<String, String> atVersion;
  private final Map<String, String> ofStreams;
  private final Map<String, String> given;
  private StructType wanted;

  /** {@code atVersion} are the source's options for queries, {@code ofStreams} for streams, {@code given} the user's. */
  LakehouseScanBuilder(
      PythonCatalog python,
      StructType schema,
      Map<String, String> atVersion,
      Map<String, String> ofStreams,
      Map<String, String> given) {
    this.python = python;
    this.schema = schema;
    this.atVersion = atVersion;
    this.ofStreams = ofStreams;
    this.given = given;
    this.wanted = schema;
  }

  /** Columns are taken whole. A query that needs none, such as a count, reads the first. */
  @Override
  public void pruneColumns(StructType required) {
    Set<String> names = new LinkedHashSet<>();
    for (StructField field : required.fields()) {
      names.add(field.name());
    }
    if (names.isEmpty() && schema.length() > 0) {
      names.add(schema.apply(0).name());
    }
    StructType left = new StructType();
    for (StructField field : schema.fields()) {
      if (names.contains(field.name())) {
        left = left.add(field);
      }
    }
    wanted = left;
  }

  @Override
  public Scan build() {
    return new LakehouseScan();
  }

  private Scan scan(Map<String, String> own) {
    Map<String, String> options = new HashMap<>(own);
    given.forEach((name, value) -> {
      if (options.putIfAbsent(name.toLowerCase(java.util.Locale.ROOT), value) != null) {
        throw new LakehouseException("InvalidInputError: the option '" + name + "' is the catalog's own here");
      }
    });
    if (wanted.length() < schema.length()) {
      options.put("columns", Json.names(wanted.fieldNames()));
    }
    CaseInsensitiveStringMap all = python.optionsWith(options);
    TableProvider source = python.rows();
    SupportsRead table = (SupportsRead) source.getTable(wanted, new Transform[0], all.asCaseSensitiveMap());
    return table.newScanBuilder(all).build();
  }

  private final class LakehouseScan implements Scan {
    private Scan planned;

    private synchronized Scan planned() {
      if (planned == null) {
        planned = scan(atVersion);
      }
      return planned;
    }

    @Override
    public StructType readSchema() {
      return wanted;
    }

    @Override
    public String description() {
      return "trinitylake " + atVersion + " columns " + String.join(", ", wanted.fieldNames());
    }

    @Override
    public Batch toBatch() {
      Batch batch = planned().toBatch();
      return new Batch() {
        @Override
        public InputPartition[] planInputPartitions() {
          try {
            return batch.planInputPartitions();
          } catch (RuntimeException error) {
            throw LakehouseException.of(error);
          }
        }

        @Override
        public PartitionReaderFactory createReaderFactory() {
          return batch.createReaderFactory();
        }
      };
    }

    @Override
    public MicroBatchStream toMicroBatchStream(String checkpointLocation) {
      return scan(ofStreams).toMicroBatchStream(checkpointLocation);
    }

    @Override
    public CustomMetric[] supportedCustomMetrics() {
      return planned().supportedCustomMetrics();
    }
  }
}
