package trinitylake.spark;

import com.fasterxml.jackson.databind.JsonNode;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;

/** A response from Python, read from a schema: a struct "schema", and JSON in the metadata of a field "answer". */
final class Response {
  private final StructType packed;
  private final JsonNode answer;

  Response(StructType packed) {
    this.packed = packed;
    StructField field = packed.apply("answer");
    this.answer = Json.parse(field.metadata().getString("json"));
  }

  /** Returns whether the request was rejected for a reason that has an exception in Spark. */
  boolean is(String reason) {
    return reason.equals(answer.path("refusal").textValue());
  }

  /** Returns the value. Throws LakehouseException if the request failed. */
  JsonNode value() {
    if (answer.has("error")) {
      throw new LakehouseException(answer.get("error").textValue());
    }
    return answer.get("value");
  }

  /** Returns the columns of a table. Throws LakehouseException if the request failed. */
  StructType schema() {
    value();
    return (StructType) packed.apply("schema").dataType();
  }
}
