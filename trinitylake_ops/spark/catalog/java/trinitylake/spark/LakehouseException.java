package trinitylake.spark;

import java.util.function.Supplier;
import org.apache.spark.SparkThrowable;

/**
 * One line from Python, which begins with the class of its error. PySpark shows it without a stack. As one of Spark's it
 * passes where Spark would wrap others. It has none of Spark's conditions.
 */
final class LakehouseException extends IllegalArgumentException implements SparkThrowable {
  private static final long serialVersionUID = 1L;
  private static final String TRACEBACK = "Traceback (most recent call last):";
  private static final String OWN = "trinitylake_ops.errors.";

  LakehouseException(String message) {
    super(message);
  }

  private LakehouseException(String message, Throwable cause) {
    super(message, cause);
  }

  @Override
  public String getCondition() {
    return null;
  }

  @Override
  public String getSqlState() {
    return null;
  }

  /** Runs what asks Python. Spark's errors around those of this package become one line, others pass as they are. */
  static <T> T inOneLine(Supplier<T> call) {
    try {
      return call.get();
    } catch (Exception error) { // Spark's own are checked, and Scala declares none
      String line = lineOf(error.getMessage());
      if (line == null) {
        throw error;
      }
      throw new LakehouseException(line, error);
    }
  }

  private static String lineOf(String message) {
    int begin = message == null ? -1 : message.lastIndexOf(TRACEBACK);
    if (begin >= 0) {
      for (String line : message.substring(begin + TRACEBACK.length()).split("\n")) {
        if (line.startsWith(OWN)) {
          return line.substring(OWN.length()).trim();
        }
      }
    }
    return null;
  }
}
