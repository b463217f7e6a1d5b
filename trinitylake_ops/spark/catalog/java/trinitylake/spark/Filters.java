package trinitylake.spark;

import com.fasterxml.jackson.databind.node.ObjectNode;
import java.math.BigDecimal;
import java.sql.Date;
import java.sql.Timestamp;
import java.time.Instant;
import java.time.LocalDate;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Deque;
import java.util.List;
import java.util.Set;
import org.apache.spark.sql.sources.AlwaysTrue;
import org.apache.spark.sql.sources.And;
import org.apache.spark.sql.sources.EqualNullSafe;
import org.apache.spark.sql.sources.EqualTo;
import org.apache.spark.sql.sources.Filter;
import org.apache.spark.sql.sources.GreaterThan;
import org.apache.spark.sql.sources.GreaterThanOrEqual;
import org.apache.spark.sql.sources.In;
import org.apache.spark.sql.sources.IsNotNull;
import org.apache.spark.sql.sources.IsNull;
import org.apache.spark.sql.sources.LessThan;
import org.apache.spark.sql.sources.LessThanOrEqual;
import org.apache.spark.sql.sources.Or;

/** Converts Spark's filters to options of the data source: row_filter for scans, partition for overwrites. */
final class Filters {
  private static final String NAME = "[A-Za-z_][A-Za-z0-9_]*";
  private static final String TEXT = "[A-Za-z0-9 _.,:/+-]+";
  /** Calendars differ before this year. */
  private static final int FIRST_YEAR = 1900;
  private static final int LAST_YEAR = 9999;
  private static final int MOST_VALUES = 1000;
  private static final int MOST_PARTS = 50;
  private static final int DEEPEST = 4;

  private Filters() {}

  /**
   * Returns a row_filter that matches at least all rows that the filter matches, or null if there is none. Spark
   * applies the filter again, so conditions without an exact equivalent are omitted.
   *
   * @param columns the columns that compare equally in Iceberg and Spark; fractional ones do not, because of NaN
   */
  static String toRowFilter(Filter filter, Set<String> columns) {
    return toRowFilter(filter, columns, DEEPEST);
  }

  private static String toRowFilter(Filter filter, Set<String> columns, int depth) {
    if (depth == 0) {
      return null;
    }
    if (filter instanceof And || filter instanceof Or) {
      boolean isOr = filter instanceof Or;
      List<String> conditions = new ArrayList<>();
      for (Filter part : parts(filter, isOr)) {
        String condition = toRowFilter(part, columns, depth - 1);
        if (condition != null) {
          conditions.add(condition);
        } else if (isOr) {
          return null;
        }
      }
      boolean isAccepted = !conditions.isEmpty() && conditions.size() <= MOST_PARTS;
      return isAccepted ? "(" + String.join(isOr ? " or " : " and ", conditions) + ")" : null;
    }
    if (filter instanceof In) {
      return in((In) filter, columns);
    }
    if (filter instanceof IsNotNull) {
      return of(((IsNotNull) filter).attribute(), "is not null", columns);
    }
    if (filter instanceof IsNull) {
      return of(((IsNull) filter).attribute(), "is null", columns);
    }
    return compared(filter, columns);
  }

  /** Returns the operands of nested disjunctions, or of nested conjunctions. */
  private static List<Filter> parts(Filter filter, boolean isOr) {
    List<Filter> parts = new ArrayList<>();
    Deque<Filter> waiting = new ArrayDeque<>(List.of(filter));
    while (!waiting.isEmpty()) {
      Filter part = waiting.pop();
      if (isOr && part instanceof Or) {
        waiting.push(((Or) part).right());
        waiting.push(((Or) part).left());
      } else if (!isOr && part instanceof And) {
        waiting.push(((And) part).right());
        waiting.push(((And) part).left());
      } else {
        parts.add(part);
      }
    }
    return parts;
  }

  private static String compared(Filter filter, Set<String> columns) {
    if (filter instanceof EqualTo) {
      return of(((EqualTo) filter).attribute(), "=", ((EqualTo) filter).value(), columns);
    }
    if (filter instanceof EqualNullSafe) {
      return of(((EqualNullSafe) filter).attribute(), "=", ((EqualNullSafe) filter).value(), columns);
    }
    if (filter instanceof LessThan) {
      return of(((LessThan) filter).attribute(), "<", ((LessThan) filter).value(), columns);
    }
    if (filter instanceof LessThanOrEqual) {
      return of(((LessThanOrEqual) filter).attribute(), "<=", ((LessThanOrEqual) filter).value(), columns);
    }
    if (filter instanceof GreaterThan) {
      return of(((GreaterThan) filter).attribute(), ">", ((GreaterThan) filter).value(), columns);
    }
    if (filter instanceof GreaterThanOrEqual) {
      return of(((GreaterThanOrEqual) filter).attribute(), ">=", ((GreaterThanOrEqual) filter).value(), columns);
    }
    return null;
  }

  private static String in(In filter, Set<String> columns) {
    List<String> values = new ArrayList<>();
    for (Object value : filter.values()) {
      String literal = literal(value);
      if (value != null && literal == null) {
        return null;
      }
      if (literal != null) { // NULL matches no row
        values.add(literal);
      }
    }
    boolean isAccepted = !values.isEmpty() && values.size() <= MOST_VALUES;
    return isAccepted ? of(filter.attribute(), "in (" + String.join(", ", values) + ")", columns) : null;
  }

  private static String of(String column, String operator, Object value, Set<String> columns) {
    String literal = literal(value);
    return literal == null ? null : of(column, operator + " " + literal, columns);
  }

  private static String of(String column, String condition, Set<String> columns) {
    return columns.contains(column) && column.matches(NAME) ? "\"" + column + "\" " + condition : null;
  }

  /** Returns a literal for row_filter, or null if the value has no unambiguous one. */
  private static String literal(Object value) {
    if (value instanceof Integer || value instanceof Long) {
      return value.toString();
    }
    if (value instanceof String && ((String) value).matches(TEXT)) {
      return "'" + value + "'";
    }
    if (value instanceof Date || value instanceof LocalDate) {
      LocalDate date = value instanceof Date ? ((Date) value).toLocalDate() : (LocalDate) value;
      return isUsual(date.getYear()) ? "'" + date + "'" : null;
    }
    if (value instanceof Timestamp || value instanceof Instant) {
      String time = instant(value).toString();
      return time.matches("[0-9]{4}-.*") && isUsual(Integer.parseInt(time.substring(0, 4)))
          ? "'" + time.replace("Z", "+00:00") + "'"
          : null;
    }
    return null;
  }

  private static Instant instant(Object value) {
    return value instanceof Timestamp ? ((Timestamp) value).toInstant() : (Instant) value;
  }

  private static boolean isUsual(int year) {
    return FIRST_YEAR <= year && year <= LAST_YEAR;
  }

  /** Returns whether a filter is a conjunction of equalities, as in INSERT OVERWRITE ... PARTITION (column = value). */
  static boolean isPartition(Filter filter) {
    if (filter instanceof And) {
      return isPartition(((And) filter).left()) && isPartition(((And) filter).right());
    }
    return filter instanceof AlwaysTrue
        || filter instanceof EqualTo
        || filter instanceof EqualNullSafe
        || filter instanceof IsNull;
  }

  /** Returns the partition values by column as JSON, or null for the whole table. */
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
    if (values.has(column)) {
      throw new LakehouseException("InvalidInputError: duplicate partition column '" + column + "'");
    }
    if (value == null) {
      values.putNull(column);
    } else if (value instanceof Boolean) {
      values.put(column, (Boolean) value);
    } else if (value instanceof Integer || value instanceof Long) {
      values.put(column, ((Number) value).longValue());
    } else if (value instanceof BigDecimal) {
      values.put(column, ((BigDecimal) value).toPlainString());
    } else if (value instanceof Timestamp || value instanceof Instant) {
      values.put(column, instant(value).toString().replace("Z", "+00:00"));
    } else {
      values.put(column, value.toString()); // strings and dates
    }
  }
}
