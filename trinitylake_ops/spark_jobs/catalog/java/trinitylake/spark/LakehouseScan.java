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

/** A scan that the data source does, with some columns, and with filters that Spark looks at again. */
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
    Batch batch = planned().toBatch();
    return new Batch() {
      @Override
      public InputPartition[] planInputPartitions() {
        return LakehouseException.inOneLine(batch::planInputPartitions);
      }

      @Override
      public PartitionReaderFactory createReaderFactory() {
        return batch.createReaderFactory();
      }
    };
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

  /** Of the whole table, as Spark's own reader of files tells it. */
  @Override
  public Statistics estimateStatistics() {
    return new Statistics() {
      @Override
      public OptionalLong sizeInBytes() {
        return options.figure("size_bytes");
      }

      @Override
      public OptionalLong numRows() {
        return options.figure("rows");
      }
    };
  }
}
