package trinitylake.spark;

import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.LinkedHashMap;
import java.util.Map;
import org.apache.spark.sql.connector.catalog.Column;
import org.apache.spark.sql.connector.catalog.Identifier;
import org.apache.spark.sql.connector.catalog.TableChange;
import org.apache.spark.sql.connector.expressions.Expression;
import org.apache.spark.sql.connector.expressions.Expressions;
import org.apache.spark.sql.connector.expressions.Literal;
import org.apache.spark.sql.connector.expressions.NamedReference;
import org.apache.spark.sql.connector.expressions.Transform;

/** Converts Spark's descriptions of tables and changes to JSON for Python, and back. */
final class Json {
  private static final ObjectMapper MAPPER = new ObjectMapper();

  private Json() {}

  static ObjectNode object() {
    return MAPPER.createObjectNode();
  }

  static JsonNode parse(String text) {
    try {
      return MAPPER.readTree(text);
    } catch (JsonProcessingException error) {
      throw new IllegalStateException("the response of Python is not JSON", error);
    }
  }

  static Map<String, String> strings(JsonNode object) {
    Map<String, String> strings = new LinkedHashMap<>();
    object.fieldNames().forEachRemaining(key -> strings.put(key, object.get(key).textValue()));
    return strings;
  }

  static String names(String[] names) {
    ArrayNode list = MAPPER.createArrayNode();
    for (String name : names) {
      list.add(name);
    }
    return list.toString();
  }

  static void put(ObjectNode node, String key, String[] names) {
    ArrayNode list = node.putArray(key);
    for (String name : names) {
      list.add(name);
    }
  }

  static void put(ObjectNode node, String key, Map<String, String> strings) {
    strings.forEach(node.putObject(key)::put);
  }

  static void put(ObjectNode node, String key, Identifier table) {
    ArrayNode list = node.putArray(key);
    for (String name : table.namespace()) {
      list.add(name);
    }
    list.add(table.name());
  }

  static void put(ObjectNode node, String key, Column[] columns) {
    ArrayNode list = node.putArray(key);
    for (Column column : columns) {
      ObjectNode field = list.addObject();
      field.put("name", column.name());
      field.set("type", parse(column.dataType().json()));
      field.put("nullable", column.nullable());
      field.put("comment", column.comment());
    }
  }

  static void put(ObjectNode node, String key, Transform[] partitions) {
    ArrayNode list = node.putArray(key);
    for (Transform partition : partitions) {
      ObjectNode one = list.addObject();
      one.put("transform", partition.name());
      ArrayNode columns = one.putArray("columns");
      for (Expression argument : partition.arguments()) {
        if (argument instanceof NamedReference) {
          put(columns.addObject(), "path", ((NamedReference) argument).fieldNames());
        } else if (argument instanceof Literal && ((Literal<?>) argument).value() instanceof Number) {
          one.put("number", ((Number) ((Literal<?>) argument).value()).longValue());
        } else {
          throw new UnsupportedOperationException("partitioning by " + partition.describe() + " is not supported");
        }
      }
    }
  }

  /** Returns the partition transforms of a table from their description by Python. */
  static Transform[] transforms(JsonNode partitions) {
    Transform[] transforms = new Transform[partitions.size()];
    for (int i = 0; i < transforms.length; i++) {
      JsonNode partition = partitions.get(i);
      NamedReference column = Expressions.column(partition.get("column").textValue());
      String name = partition.get("transform").textValue();
      transforms[i] = partition.has("number")
          ? Expressions.apply(name, Expressions.literal(partition.get("number").intValue()), column)
          : Expressions.apply(name, column);
    }
    return transforms;
  }

  static ObjectNode of(TableChange change) {
    ObjectNode node = object();
    node.put("change", change.getClass().getSimpleName());
    if (change instanceof TableChange.SetProperty) {
      TableChange.SetProperty set = (TableChange.SetProperty) change;
      node.put("property", set.property()).put("value", set.value());
    } else if (change instanceof TableChange.RemoveProperty) {
      node.put("property", ((TableChange.RemoveProperty) change).property());
    } else if (change instanceof TableChange.ColumnChange) {
      put(node, "path", ((TableChange.ColumnChange) change).fieldNames());
      describe((TableChange.ColumnChange) change, node);
    } else {
      throw unsupported(change);
    }
    return node;
  }

  private static void describe(TableChange.ColumnChange change, ObjectNode node) {
    if (change instanceof TableChange.AddColumn) {
      TableChange.AddColumn add = (TableChange.AddColumn) change;
      if (add.defaultValue() != null) {
        throw new UnsupportedOperationException("columns with default values are not supported");
      }
      node.set("type", parse(add.dataType().json()));
      node.put("nullable", add.isNullable()).put("comment", add.comment());
      place(add.position(), node);
    } else if (change instanceof TableChange.RenameColumn) {
      node.put("name", ((TableChange.RenameColumn) change).newName());
    } else if (change instanceof TableChange.UpdateColumnType) {
      node.set("type", parse(((TableChange.UpdateColumnType) change).newDataType().json()));
    } else if (change instanceof TableChange.UpdateColumnNullability) {
      node.put("nullable", ((TableChange.UpdateColumnNullability) change).nullable());
    } else if (change instanceof TableChange.UpdateColumnComment) {
      node.put("comment", ((TableChange.UpdateColumnComment) change).newComment());
    } else if (change instanceof TableChange.UpdateColumnPosition) {
      place(((TableChange.UpdateColumnPosition) change).position(), node);
    } else if (change instanceof TableChange.DeleteColumn) {
      node.put("if_exists", ((TableChange.DeleteColumn) change).ifExists());
    } else {
      throw unsupported(change);
    }
  }

  private static void place(TableChange.ColumnPosition position, ObjectNode node) {
    if (position instanceof TableChange.After) {
      node.put("after", ((TableChange.After) position).column());
    } else if (position != null) {
      node.put("first", true);
    }
  }

  private static UnsupportedOperationException unsupported(TableChange change) {
    return new UnsupportedOperationException("table change " + change.getClass().getSimpleName() + " is not supported");
  }
}
