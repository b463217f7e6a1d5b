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
 * Sends requests of the catalog to Python. Spark creates a Python data source in a helper process of the driver, passes
 * options and reads its schema. A request is an option, and the response is in the schema. This works wherever the data
 * source works: in a PySpark session, in spark-sql and in a Spark Connect server.
 */
final class PythonCatalog {
  private static final String ROWS = "trinitylake";
  private static final String REQUESTS = "trinitylake_catalog";

  private final Map<String, String> options;

  PythonCatalog(Map<String, String> options) {
    this.options = options;
  }

  /** Returns a new request, without arguments. */
  ObjectNode request(String what) {
    ObjectNode request = Json.object();
    request.put("request", what);
    return request;
  }

  /** Sends a request and returns the response. Throws LakehouseException if Python raised an error. */
  Response send(ObjectNode request) {
    Map<String, String> withRequest = new HashMap<>(options);
    withRequest.put("request", request.toString());
    CaseInsensitiveStringMap all = new CaseInsensitiveStringMap(withRequest);
    return LakehouseException.inOneLine(() -> new Response(provider(REQUESTS).inferSchema(all)));
  }

  /** Returns a new source of rows for one scan or write, because Spark caches the plan of Python in it. */
  TableProvider rows() {
    return provider(ROWS);
  }

  /** Returns the catalog's options, overridden by others. */
  CaseInsensitiveStringMap optionsWith(Map<String, String> others) {
    Map<String, String> all = new HashMap<>(options);
    all.putAll(others);
    return new CaseInsensitiveStringMap(all);
  }

  private static TableProvider provider(String format) {
    if (SparkSession.getActiveSession().isEmpty()) {
      // Spark looks up Python data sources in the active session of the thread, and streaming threads have none.
      SparkSession.getDefaultSession().foreach(session -> {
        SparkSession.setActiveSession(session);
        return null;
      });
    }
    Option<TableProvider> found = DataSource.lookupDataSourceV2(format, SQLConf.get());
    if (found.isEmpty()) {
      throw new LakehouseException("MissingExtraError: data source " + format + " is not registered in this Spark");
    }
    return found.get();
  }
}
