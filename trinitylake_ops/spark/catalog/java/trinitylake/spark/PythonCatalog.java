package trinitylake.spark;

import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.HashMap;
import java.util.Map;
import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.connector.catalog.TableProvider;
import org.apache.spark.sql.execution.datasources.DataSource;
import org.apache.spark.sql.internal.SQLConf;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;
import scala.Option;

/**
 * How the catalog reaches Python. Spark makes a data source of Python in a helper process of the driver, gives it
 * options and takes its schema. A request is such an option, and the answer is in the schema. So it works wherever the
 * data source does, in a session of PySpark, in spark-sql and in a server of Spark Connect.
 */
final class PythonCatalog {
  private static final String ROWS = "trinitylake";
  private static final String ANSWERS = "trinitylake_catalog";

  private final Map<String, String> options;

  PythonCatalog(Map<String, String> options) {
    this.options = options;
  }

  /** Returns a request, to be completed. */
  ObjectNode request(String what) {
    ObjectNode request = Json.object();
    request.put("request", what);
    return request;
  }

  /** Returns the answer. Throws LakehouseException where Python raised an error. */
  Answer ask(ObjectNode request) {
    Map<String, String> given = new HashMap<>(options);
    given.put("request", request.toString());
    CaseInsensitiveStringMap all = new CaseInsensitiveStringMap(given);
    return LakehouseException.inOneLine(() -> new Answer(provider(ANSWERS).inferSchema(all)));
  }

  /** Returns a source of rows for one scan or write: Spark keeps with it what Python planned. */
  TableProvider rows() {
    return provider(ROWS);
  }

  /** Returns the catalog's options with others on top. */
  CaseInsensitiveStringMap optionsWith(Map<String, String> others) {
    Map<String, String> all = new HashMap<>(options);
    all.putAll(others);
    return new CaseInsensitiveStringMap(all);
  }

  private static TableProvider provider(String format) {
    if (SparkSession.getActiveSession().isEmpty()) {
      // Spark looks for Python's sources in the session of the thread, and a thread of streams has none.
      SparkSession.getDefaultSession().foreach(session -> {
        SparkSession.setActiveSession(session);
        return null;
      });
    }
    Option<TableProvider> found = DataSource.lookupDataSourceV2(format, SQLConf.get());
    if (found.isEmpty()) {
      throw new LakehouseException("MissingExtraError: this Spark does not know the data source " + format);
    }
    return found.get();
  }
}
