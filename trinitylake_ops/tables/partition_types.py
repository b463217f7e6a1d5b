"""Partition specs that know the types of their source columns after those columns were dropped.

An old spec stays in use while data files of it exist, also if its source column is no longer in the current schema.
pyiceberg computes the types of partition values from the current schema only. Without the source column it cannot
encode the values: it raises TypeError, or it writes nulls, which detach delete files from the data files of their
partition. The former schemas of the table hold the types.
"""

from __future__ import annotations

from pydantic import PrivateAttr
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema, index_by_id
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.types import IcebergType, NestedField, StructType, UnknownType

from trinitylake_ops.errors import InvalidDefinitionError


class TypedPartitionSpec(PartitionSpec):
    """A partition spec with the types of its source columns, by column id, for schemas that lack the column."""

    _source_types: dict[int, IcebergType] = PrivateAttr(default_factory=dict)

    @classmethod
    def of(cls, spec: PartitionSpec, source_types: dict[int, IcebergType]) -> TypedPartitionSpec:
        """Return ``spec`` with source types.

        Args:
            spec: The spec, which is not changed.
            source_types: The type of each source column that any schema of the table has, by column id.
        """
        typed = cls.model_construct(spec.model_fields_set, **dict(spec))
        typed._source_types = source_types
        return typed

    def partition_type(self, schema: Schema) -> StructType:
        """Return the struct type of partition values, with the types of ``schema`` where it has the source column."""
        present = super().partition_type(schema).fields
        return StructType(
            *(
                NestedField(field.field_id, field.name, self._result_type(at), required=False)
                if isinstance(field.field_type, UnknownType)
                else field
                for at, field in enumerate(present)
            )
        )

    def _result_type(self, at: int) -> IcebergType:
        field = self.fields[at]
        return field.transform.result_type(self._source_types.get(field.source_id, UnknownType()))


def with_typed_specs(metadata: TableMetadata) -> TableMetadata:
    """Return metadata whose partition specs know the types of their source columns, from all schemas of the table.

    The latest schema that has a column decides, because types only widen.
    """
    if all(spec.is_unpartitioned() for spec in metadata.partition_specs):
        return metadata
    sources = {field.source_id for spec in metadata.partition_specs for field in spec.fields}
    types = {
        column_id: column.field_type
        for schema in sorted(metadata.schemas, key=lambda schema: schema.schema_id)
        for column_id, column in index_by_id(schema).items()
        if column_id in sources
    }
    specs = [
        spec if spec.is_unpartitioned() else TypedPartitionSpec.of(spec, types) for spec in metadata.partition_specs
    ]
    return metadata.model_copy(update={"partition_specs": specs})


def check_keeps_source_types(before: TableMetadata, after: TableMetadata) -> None:
    """Raise InvalidDefinitionError if an update removes the last schema that has the source column of a spec.

    Args:
        before: The metadata of the table.
        after: The same with the update.

    Raises:
        InvalidDefinitionError: Partition values of that spec could no longer be written.
    """
    had, has = ({column for schema in one.schemas for column in index_by_id(schema)} for one in (before, after))
    for spec in after.partition_specs:
        for field in spec.fields:
            if field.source_id in had - has:
                raise InvalidDefinitionError(
                    f"the schemas cannot be removed: partition spec {spec.spec_id} needs the type of its source column"
                    f" {field.source_id}; keep a schema with that column, or remove the spec first"
                )
