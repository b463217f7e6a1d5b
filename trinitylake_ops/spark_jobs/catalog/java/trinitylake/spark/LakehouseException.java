package trinitylake.spark;

/** One line from Python, which begins with the class of its error. PySpark shows it without a stack. */
final class LakehouseException extends IllegalArgumentException {
  private static final long serialVersionUID = 1L;
  private static final String TRACEBACK = "Traceback (most recent call last):";
  private static final String OWN = "trinitylake_ops.errors.";

  LakehouseException(String message) {
    super(message);
  }

  private LakehouseException(String message, Throwable cause) {
    super(message, cause);
  }

  /** Returns the error that Python raised, or what it was given if that is none of Python's. */
  static RuntimeException of(RuntimeException error) {
    String message = error.getMessage();
    int begin = message == null ? -1 : message.lastIndexOf(TRACEBACK);
    if (begin < 0) {
      return error;
    }
    for (String line : message.substring(begin + TRACEBACK.length()).split("\n")) {
      if (line.startsWith(OWN)) {
        return new LakehouseException(line.substring(OWN.length()).trim(), error);
      }
    }
    return error;
  }
}
