package trinitylake.spark;

import com.fasterxml.jackson.databind.JsonNode;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;

/** What Python answered, taken out of a schema: a struct "schema", and JSON in the metadata of a field "answer". */
final class Answer {
  private final StructType given;
  private final JsonNode answer;

  Answer(StructType given) {
    this.given = given;
    StructField field = given.apply("answer");
    this.answer = Json.parse(field.metadata().getString("json"));
  }

  /** Whether this is the refusal that the catalog has an exception of Spark for. */
  boolean is(String refusal) {
    return refusal.equals(answer.path("refusal").textValue());
  }

  /** Returns the value. Throws LakehouseException if the request was refused. */
  JsonNode value() {
    if (answer.has("error")) {
      throw new LakehouseException(answer.get("error").textValue());
    }
    return answer.get("value");
  }

  /** Returns the columns of a table. Throws LakehouseException if the request was refused. */
  StructType schema() {
    value();
    return (StructType) given.apply("schema").dataType();
  }
}
