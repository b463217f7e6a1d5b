package trinitylake.spark;

import java.util.function.Supplier;
import org.apache.spark.SparkThrowable;

/**
 * An error of Python as a single line that starts with the error's class. PySpark shows it without a stack trace. It is
 * a SparkThrowable, without an error condition, because Spark would wrap any other exception.
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

  /** Runs a call to Python, and reduces errors of this package that Spark has wrapped to one line. */
  static <T> T inOneLine(Supplier<T> call) {
    try {
      return call.get();
    } catch (Exception error) { // Spark's exceptions are checked, but Scala does not declare them
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
