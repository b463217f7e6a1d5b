package trinitylake.spark;

import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Set;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.SupportsPushDownFilters;
import org.apache.spark.sql.connector.read.SupportsPushDownRequiredColumns;
import org.apache.spark.sql.sources.Filter;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;

/** Accepts the columns and filters of a query, which Spark does not push down to data sources in Python. */
final class LakehouseScanBuilder implements SupportsPushDownRequiredColumns, SupportsPushDownFilters {
  private final ScanOptions options;
  private final StructType schema;
  private final List<Filter> pushed = new ArrayList<>();
  private final List<String> conditions = new ArrayList<>();
  private StructType wanted;

  LakehouseScanBuilder(ScanOptions options, StructType schema) {
    this.options = options;
    this.schema = schema;
    this.wanted = schema;
  }

  /** Prunes top-level columns only. A query that needs no column, such as a count, reads the first one. */
  @Override
  public void pruneColumns(StructType required) {
    Set<String> names = new HashSet<>();
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

  /** Uses the filters where possible. Spark applies all of them again. */
  @Override
  public Filter[] pushFilters(Filter[] filters) {
    for (Filter filter : filters) {
      String condition = Filters.toRowFilter(filter, options.comparable());
      if (condition != null) {
        pushed.add(filter);
        conditions.add(condition);
      }
    }
    return filters;
  }

  @Override
  public Filter[] pushedFilters() {
    return pushed.toArray(new Filter[0]);
  }

  @Override
  public Scan build() {
    return new LakehouseScan(options, wanted, wanted.length() < schema.length(), conditions);
  }
}
