package trinitylake.spark;

import java.util.Arrays;
import java.util.HashMap;
import java.util.Locale;
import java.util.Map;
import java.util.Optional;
import org.apache.spark.sql.connector.catalog.SupportsWrite;
import org.apache.spark.sql.connector.catalog.TableProvider;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.connector.metric.CustomMetric;
import org.apache.spark.sql.connector.write.BatchWrite;
import org.apache.spark.sql.connector.write.DataWriterFactory;
import org.apache.spark.sql.connector.write.LogicalWriteInfo;
import org.apache.spark.sql.connector.write.PhysicalWriteInfo;
import org.apache.spark.sql.connector.write.SupportsDynamicOverwrite;
import org.apache.spark.sql.connector.write.SupportsOverwrite;
import org.apache.spark.sql.connector.write.SupportsTruncate;
import org.apache.spark.sql.connector.write.Write;
import org.apache.spark.sql.connector.write.WriteBuilder;
import org.apache.spark.sql.connector.write.WriterCommitMessage;
import org.apache.spark.sql.connector.write.streaming.StreamingWrite;
import org.apache.spark.sql.sources.Filter;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/** Plans a write through the data source: INSERT INTO, and the three forms of INSERT OVERWRITE. */
final class LakehouseWriteBuilder implements SupportsOverwrite, SupportsDynamicOverwrite {
  private final PythonCatalog python;
  private final LogicalWriteInfo info;
  private final Map<String, String> options;
  private boolean isOverwrite;

  LakehouseWriteBuilder(PythonCatalog python, LogicalWriteInfo info, Map<String, String> own) {
    this.python = python;
    this.info = info;
    this.options = new HashMap<>(own);
    info.options().asCaseSensitiveMap().forEach((name, value) -> {
      if (options.putIfAbsent(name.toLowerCase(Locale.ROOT), value) != null) {
        throw new LakehouseException("InvalidInputError: option '" + name + "' is set by the catalog; omit it");
      }
    });
  }

  @Override
  public WriteBuilder truncate() {
    isOverwrite = true;
    return this;
  }

  @Override
  public WriteBuilder overwriteDynamicPartitions() {
    isOverwrite = true;
    options.put("replace", "partitions");
    return this;
  }

  @Override
  public boolean canOverwrite(Filter[] filters) {
    return Arrays.stream(filters).allMatch(Filters::isPartition);
  }

  @Override
  public WriteBuilder overwrite(Filter[] filters) {
    isOverwrite = true;
    String values = Filters.partition(filters);
    if (values != null) {
      options.put("partition", values);
    }
    return this;
  }

  @Override
  public Write build() {
    CaseInsensitiveStringMap all = python.optionsWith(options);
    TableProvider source = python.rows();
    SupportsWrite table = (SupportsWrite) source.getTable(info.schema(), new Transform[0], all.asCaseSensitiveMap());
    WriteBuilder builder = table.newWriteBuilder(new Info(all));
    Write write = (isOverwrite ? ((SupportsTruncate) builder).truncate() : builder).build();
    return new Write() {
      @Override
      public String description() {
        return "trinitylake " + options;
      }

      @Override
      public BatchWrite toBatch() {
        return new OneLineErrors(LakehouseException.inOneLine(write::toBatch));
      }

      @Override
      public StreamingWrite toStreaming() {
        return LakehouseException.inOneLine(write::toStreaming);
      }

      @Override
      public CustomMetric[] supportedCustomMetrics() {
        return write.supportedCustomMetrics();
      }
    };
  }

  private final class Info implements LogicalWriteInfo {
    private final CaseInsensitiveStringMap options;

    private Info(CaseInsensitiveStringMap options) {
      this.options = options;
    }

    @Override
    public CaseInsensitiveStringMap options() {
      return options;
    }

    @Override
    public String queryId() {
      return info.queryId();
    }

    @Override
    public StructType schema() {
      return info.schema();
    }

    @Override
    public Optional<StructType> rowIdSchema() {
      return info.rowIdSchema();
    }

    @Override
    public Optional<StructType> metadataSchema() {
      return info.metadataSchema();
    }
  }

  private static final class OneLineErrors implements BatchWrite {
    private final BatchWrite write;

    private OneLineErrors(BatchWrite write) {
      this.write = write;
    }

    @Override
    public DataWriterFactory createBatchWriterFactory(PhysicalWriteInfo physical) {
      return LakehouseException.inOneLine(() -> write.createBatchWriterFactory(physical));
    }

    @Override
    public boolean useCommitCoordinator() {
      return write.useCommitCoordinator();
    }

    @Override
    public void onDataWriterCommit(WriterCommitMessage message) {
      write.onDataWriterCommit(message);
    }

    @Override
    public void commit(WriterCommitMessage[] messages) {
      LakehouseException.inOneLine(() -> {
        write.commit(messages);
        return null;
      });
    }

    @Override
    public void abort(WriterCommitMessage[] messages) {
      write.abort(messages);
    }
  }
}
