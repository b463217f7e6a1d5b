package trinitylake.spark;

import java.util.List;
import java.util.OptionalLong;
import org.apache.spark.sql.connector.metric.CustomMetric;
import org.apache.spark.sql.connector.read.Batch;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.Statistics;
import org.apache.spark.sql.connector.read.SupportsReportStatistics;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.types.StructType;

/** A scan by the data source, with the required columns, and with filters that Spark applies again. */
final class LakehouseScan implements SupportsReportStatistics {
  private final ScanOptions options;
  private final StructType wanted;
  private final boolean isPruned;
  private final List<String> filters;
  private Scan planned;

  LakehouseScan(ScanOptions options, StructType wanted, boolean isPruned, List<String> filters) {
    this.options = options;
    this.wanted = wanted;
    this.isPruned = isPruned;
    this.filters = List.copyOf(filters);
  }

  private synchronized Scan planned() {
    if (planned == null) {
      planned = options.batch(wanted, isPruned, filters);
    }
    return planned;
  }

  @Override
  public StructType readSchema() {
    return wanted;
  }

  @Override
  public String description() {
    return "trinitylake, columns " + String.join(", ", wanted.fieldNames()) + ", row_filter " + filters;
  }

  @Override
  public Batch toBatch() {
    return new OneLineBatch(planned().toBatch());
  }

  @Override
  public MicroBatchStream toMicroBatchStream(String checkpointLocation) {
    Scan stream = options.stream(wanted, isPruned);
    return LakehouseException.inOneLine(() -> stream.toMicroBatchStream(checkpointLocation));
  }

  @Override
  public CustomMetric[] supportedCustomMetrics() {
    return planned().supportedCustomMetrics();
  }

  private List<Object> identity() {
    return List.of(options.identity(), wanted, filters);
  }

  /** Batches of equal scans are equal, so that Spark runs a scan once if a query needs it twice. */
  private final class OneLineBatch implements Batch {
    private final Batch batch;

    private OneLineBatch(Batch batch) {
      this.batch = batch;
    }

    @Override
    public InputPartition[] planInputPartitions() {
      return LakehouseException.inOneLine(batch::planInputPartitions);
    }

    @Override
    public PartitionReaderFactory createReaderFactory() {
      return batch.createReaderFactory();
    }

    private List<Object> identity() {
      return LakehouseScan.this.identity();
    }

    @Override
    public boolean equals(Object other) {
      return other instanceof OneLineBatch && identity().equals(((OneLineBatch) other).identity());
    }

    @Override
    public int hashCode() {
      return identity().hashCode();
    }
  }

  /** Returns the statistics of the whole table, like Spark's own file reader. */
  @Override
  public Statistics estimateStatistics() {
    return new Statistics() {
      @Override
      public OptionalLong sizeInBytes() {
        return options.statistic("size_bytes");
      }

      @Override
      public OptionalLong numRows() {
        return options.statistic("rows");
      }
    };
  }
}
