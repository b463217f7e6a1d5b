package trinitylake.spark;

import com.fasterxml.jackson.databind.node.ObjectNode;
import java.math.BigDecimal;
import org.apache.spark.sql.sources.AlwaysTrue;
import org.apache.spark.sql.sources.And;
import org.apache.spark.sql.sources.EqualNullSafe;
import org.apache.spark.sql.sources.EqualTo;
import org.apache.spark.sql.sources.Filter;
import org.apache.spark.sql.sources.IsNull;

/** The conditions of INSERT OVERWRITE ... PARTITION (column = value, ...): equations, joined by "and". */
final class Filters {
  private Filters() {}

  static boolean isPartition(Filter filter) {
    if (filter instanceof And) {
      return isPartition(((And) filter).left()) && isPartition(((And) filter).right());
    }
    return filter instanceof AlwaysTrue
        || filter instanceof EqualTo
        || filter instanceof EqualNullSafe
        || filter instanceof IsNull;
  }

  /** Returns the values by column as JSON, or null where the whole table is meant. */
  static String partition(Filter[] filters) {
    ObjectNode values = Json.object();
    for (Filter filter : filters) {
      add(filter, values);
    }
    return values.isEmpty() ? null : values.toString();
  }

  private static void add(Filter filter, ObjectNode values) {
    if (filter instanceof And) {
      add(((And) filter).left(), values);
      add(((And) filter).right(), values);
    } else if (filter instanceof EqualTo) {
      put(values, ((EqualTo) filter).attribute(), ((EqualTo) filter).value());
    } else if (filter instanceof EqualNullSafe) {
      put(values, ((EqualNullSafe) filter).attribute(), ((EqualNullSafe) filter).value());
    } else if (filter instanceof IsNull) {
      put(values, ((IsNull) filter).attribute(), null);
    }
  }

  private static void put(ObjectNode values, String column, Object value) {
    if (value instanceof Boolean) {
      values.put(column, (Boolean) value);
    } else if (value instanceof Integer || value instanceof Long) {
      values.put(column, ((Number) value).longValue());
    } else if (value instanceof BigDecimal) {
      values.put(column, ((BigDecimal) value).toPlainString());
    } else if (value == null) {
      values.putNull(column);
    } else {
      values.put(column, value.toString()); // text, and times as java.time or java.sql write them
    }
  }
}
