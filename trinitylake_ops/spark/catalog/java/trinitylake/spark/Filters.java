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

/** Spark's filters as the source's options: of scans in the words of row_filter, of writes as the partition to replace. */
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
   * Returns a filter in the words of row_filter that keeps all rows for which this one holds, and maybe more, or null.
   * Spark looks at the rows again, so what cannot be said safely is left out. {@code columns} are those that compare in
   * Iceberg as in Spark; numbers with a fraction do not, because of NaN.
   */
  static String inWords(Filter filter, Set<String> columns) {
    return inWords(filter, columns, DEEPEST);
  }

  private static String inWords(Filter filter, Set<String> columns, int depth) {
    if (depth == 0) {
      return null;
    }
    if (filter instanceof And || filter instanceof Or) {
      boolean isOr = filter instanceof Or;
      List<String> said = new ArrayList<>();
      for (Filter part : parts(filter, isOr)) {
        String words = inWords(part, columns, depth - 1);
        if (words != null) {
          said.add(words);
        } else if (isOr) {
          return null;
        }
      }
      boolean isSayable = !said.isEmpty() && said.size() <= MOST_PARTS;
      return isSayable ? "(" + String.join(isOr ? " or " : " and ", said) + ")" : null;
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

  /** The conditions that are joined by "or", or by "and", however they are nested. */
  private static List<Filter> parts(Filter filter, boolean isOr) {
    List<Filter> parts = new ArrayList<>();
    Deque<Filter> waiting = new ArrayDeque<>(List.of(filter));
    while (!waiting.isEmpty()) {
      Filter one = waiting.pop();
      if (isOr && one instanceof Or) {
        waiting.push(((Or) one).right());
        waiting.push(((Or) one).left());
      } else if (!isOr && one instanceof And) {
        waiting.push(((And) one).right());
        waiting.push(((And) one).left());
      } else {
        parts.add(one);
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
      if (literal != null) { // NULL among the values equals nothing
        values.add(literal);
      }
    }
    boolean isSayable = !values.isEmpty() && values.size() <= MOST_VALUES;
    return isSayable ? of(filter.attribute(), "in (" + String.join(", ", values) + ")", columns) : null;
  }

  private static String of(String column, String operator, Object value, Set<String> columns) {
    String literal = literal(value);
    return literal == null ? null : of(column, operator + " " + literal, columns);
  }

  private static String of(String column, String condition, Set<String> columns) {
    return columns.contains(column) && column.matches(NAME) ? "\"" + column + "\" " + condition : null;
  }

  /** A literal of the filter's words, or null for a value that has none without doubt. */
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

  /** Whether a condition of INSERT OVERWRITE ... PARTITION (column = value, ...) is this: equations, joined by "and". */
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
    if (values.has(column)) {
      throw new LakehouseException("InvalidInputError: the partition names the column '" + column + "' twice");
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
      values.put(column, value.toString()); // text, and dates as they are written
    }
  }
}
