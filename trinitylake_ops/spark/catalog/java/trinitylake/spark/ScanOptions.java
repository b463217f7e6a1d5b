package trinitylake.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.OptionalLong;
import java.util.Set;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.TableProvider;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/** Options of the data source for scans of a table: those from Python, which pin the version, and the query's. */
final class ScanOptions {
  private static final Set<String> TIMES_OF_SPARK = Set.of("versionasof", "timestampasof");
  private static final String ROW_FILTER = "row_filter";

  private final PythonCatalog python;
  private final JsonNode described;
  private final Map<String, String> given = new HashMap<>();

  /** {@code described} is the response of Python to load_table. */
  ScanOptions(PythonCatalog python, JsonNode described, CaseInsensitiveStringMap ofQuery) {
    this.python = python;
    this.described = described;
    ofQuery.asCaseSensitiveMap().forEach((name, value) -> {
      String folded = name.toLowerCase(Locale.ROOT);
      if (!TIMES_OF_SPARK.contains(folded)) {
        given.put(folded, value);
      }
    });
  }

  /** Returns an object that is equal for scans of the same table at the same version with the same options. */
  Object identity() {
    return List.of(python.optionsWith(given).asCaseSensitiveMap(), described);
  }

  /** Returns the columns that compare equally in Iceberg and Spark. */
  Set<String> comparable() {
    Set<String> names = new HashSet<>();
    described.path("comparable").forEach(name -> names.add(name.textValue()));
    return names;
  }

  /** Returns a statistic of the table, if the description contains it. */
  OptionalLong statistic(String name) {
    JsonNode value = described.path(name);
    return value.isIntegralNumber() ? OptionalLong.of(value.longValue()) : OptionalLong.empty();
  }

  /** Plans a query of the pinned version, with a separate source, because Spark caches the plan in the source. */
  Scan batch(StructType wanted, boolean isPruned, List<String> filters) {
    Map<String, String> options = merged("read_options");
    if (isPruned) {
      options.put("columns", Json.names(wanted.fieldNames()));
    }
    if (!filters.isEmpty()) {
      String pushed = String.join(" and ", filters);
      options.merge(ROW_FILTER, pushed, (own, ours) -> "(" + own + ") and " + ours);
    }
    return scan(options, wanted);
  }

  /** Plans a stream, which reads version after version. */
  Scan stream(StructType wanted, boolean isPruned) {
    Map<String, String> options = merged("stream_options");
    if (isPruned) {
      options.put("columns", Json.names(wanted.fieldNames()));
    }
    return scan(options, wanted);
  }

  private Map<String, String> merged(String own) {
    Map<String, String> options = new HashMap<>(given);
    Json.strings(described.get(own)).forEach((name, value) -> {
      if (options.put(name, value) != null) {
        throw new LakehouseException("InvalidInputError: option '" + name + "' is set by the catalog; omit it");
      }
    });
    if (options.containsKey("columns")) {
      throw new LakehouseException("InvalidInputError: option 'columns' is set by the catalog; use SELECT instead");
    }
    return options;
  }

  private Scan scan(Map<String, String> options, StructType wanted) {
    CaseInsensitiveStringMap all = python.optionsWith(options);
    TableProvider source = python.rows();
    SupportsRead table = (SupportsRead) source.getTable(wanted, new Transform[0], all.asCaseSensitiveMap());
    return table.newScanBuilder(all).build();
  }
}
