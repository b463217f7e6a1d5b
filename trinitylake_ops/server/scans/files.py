"""Scan planning responses: the files of a scan as JSON, and the request handlers."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Collection, Mapping
from typing import Any

from pyiceberg.catalog.rest.scan_planning import FetchScanTasksRequest
from pyiceberg.conversions import from_bytes, to_json
from pyiceberg.expressions import BooleanExpression
from pyiceberg.manifest import DataFile, DataFileContent
from pyiceberg.table import FileScanTask, Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.types import PrimitiveType

from trinitylake_ops.errors import CorruptFileError
from trinitylake_ops.server.calls import Call
from trinitylake_ops.server.responses import JsonResponse, RejectedError
from trinitylake_ops.server.scans.parts import no_such_task, part_of
from trinitylake_ops.server.scans.planner import Planned, Planner, check_is_of

_CONTENT = {
    DataFileContent.DATA: "data",
    DataFileContent.POSITION_DELETES: "position-deletes",
    DataFileContent.EQUALITY_DELETES: "equality-deletes",
}
_COUNTS = ("column_sizes", "value_counts", "null_value_counts", "nan_value_counts")
MAX_PLAN_BYTES = 64 << 20
_BOUNDS = ("lower_bounds", "upper_bounds")


def scan_document(
    planned: Planned, metadata: TableMetadata, stats_fields: Collection[int], members: Mapping[str, Any] | None = None
) -> bytes:
    """Encode the files and parts of a scan as JSON.

    Each delete file is listed once, and data files refer to it by its index. Tasks are encoded one by one, because
    encoding all of them in one call would block all other requests.

    Args:
        planned: The files and parts.
        metadata: The metadata of the table, with the schema of the scan.
        stats_fields: The ids of the columns whose statistics are included.
        members: Additional members of the document.

    Raises:
        CorruptFileError: If a file has invalid partition values or column bounds.
        RejectedError: Status 413 if the filter is too long to be repeated for each file.
    """
    writer = _Writer(metadata, stats_fields, planned.residual)
    tasks, n_bytes = [], 0
    for task in planned.tasks:
        tasks.append(writer.task(task))
        n_bytes += len(tasks[-1])
        if n_bytes > MAX_PLAN_BYTES:
            raise RejectedError(
                413,
                "BadRequestException",
                f"the plan is larger than {MAX_PLAN_BYTES >> 20} MiB, because it repeats the filter for each file;"
                " plan with a shorter filter, or read the manifests in the client",
            )
    head = {**(members or {}), "plan-tasks": [part.text() for part in planned.parts]}
    if writer.deletes:
        head["delete-files"] = writer.deletes
    return b'%b, "file-scan-tasks": [%b]}' % (json.dumps(head).encode()[:-1], b", ".join(tasks))


class _Writer:
    """Encodes the files of one response."""

    def __init__(self, metadata: TableMetadata, stats_fields: Collection[int], residual: BooleanExpression | None):
        schema = metadata.schema()
        self._partitions = {
            spec_id: [field.field_type for field in spec.partition_type(schema).fields]
            for spec_id, spec in metadata.specs().items()
        }
        self._stats = {field_id: schema.find_type(field_id) for field_id in stats_fields}
        self._positions: dict[tuple[str, int], int] = {}
        self._residual = residual
        #: The last residual and its JSON. Files share a residual unless their partitions simplify it.
        self._encoded: tuple[BooleanExpression | None, bytes | None] = (None, None)
        self.deletes: list[dict[str, Any]] = []

    def task(self, task: FileScanTask) -> bytes:
        document: dict[str, Any] = {"data-file": self._file(task.file)}
        if task.delete_files:
            ordered = sorted(task.delete_files, key=lambda file: file.file_path)
            document["delete-file-references"] = sorted(self._position(file) for file in ordered)
        text, residual = (
            json.dumps(document).encode(),
            self._filter(task.residual if self._residual is None else self._residual),
        )
        return text if residual is None else b'%b, "residual-filter": %b}' % (text[:-1], residual)

    def _filter(self, residual: BooleanExpression) -> bytes | None:
        if self._encoded[0] is not residual:
            content = _expression(residual)
            self._encoded = (residual, None if content is None else json.dumps(content).encode())
        return self._encoded[1]

    def _position(self, file: DataFile) -> int:
        offset = _attribute(file, "content_offset")
        key = (file.file_path, offset or 0)
        if key not in self._positions:
            self._positions[key] = len(self.deletes)
            document = self._file(file)
            for name in ("referenced_data_file", "content_offset", "content_size_in_bytes"):
                if (value := _attribute(file, name)) is not None:
                    document[name.replace("_", "-")] = value
            self.deletes.append(document)
        return self._positions[key]

    def _file(self, file: DataFile) -> dict[str, Any]:
        try:
            return self._document(file)
        except (ValueError, TypeError, LookupError, ArithmeticError, NotImplementedError) as error:
            raise CorruptFileError(
                f"{file.file_path[:200]!r} has invalid partition values or column statistics: {type(error).__name__}",
                path=file.file_path[:200],
            ) from error

    def _document(self, file: DataFile) -> dict[str, Any]:
        types = self._partitions[file.spec_id]
        document: dict[str, Any] = {
            "spec-id": file.spec_id,
            "partition": [_value(kind, file.partition[at]) for at, kind in enumerate(types)],
            "content": _CONTENT[file.content],
            "file-path": file.file_path,
            "file-format": file.file_format.value.lower(),
            "file-size-in-bytes": file.file_size_in_bytes,
            "record-count": file.record_count,
        }
        if file.split_offsets:
            document["split-offsets"] = list(file.split_offsets)
        if file.sort_order_id is not None:
            document["sort-order-id"] = file.sort_order_id
        if (key := _attribute(file, "key_metadata")) is not None:
            document["key-metadata"] = base64.b64encode(key).decode()
        if file.content == DataFileContent.DATA:
            document.update(self._statistics(file))
        return document

    def _statistics(self, file: DataFile) -> dict[str, Any]:
        stats: dict[str, Any] = {}
        for name in _COUNTS:
            counts: Mapping[int, int] = _attribute(file, name) or {}
            selected = {field_id: counts[field_id] for field_id in self._stats if field_id in counts}
            stats |= _columns(name, selected)
        for name in _BOUNDS:
            bounds: Mapping[int, bytes] = _attribute(file, name) or {}
            values: dict[int, Any] = {}
            for field_id, kind in self._stats.items():
                if field_id in bounds and isinstance(kind, PrimitiveType):
                    value = _value(kind, from_bytes(kind, bounds[field_id]))
                    if value is not None:
                        values[field_id] = value
            stats |= _columns(name, values)
        return stats


def _columns(name: str, values: Mapping[int, Any]) -> dict[str, Any]:
    if not values:
        return {}
    return {name.replace("_", "-"): {"keys": list(values), "values": list(values.values())}}


def _attribute(file: DataFile, name: str) -> Any:
    """Return an attribute of a file, or None if its format version has no such field."""
    return getattr(file, name, None)


def _value(kind: Any, value: Any) -> Any:
    """Return a value in the specification's JSON form, or None for infinity and NaN, which JSON cannot represent."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return to_json(kind, value)


def _expression(expression: BooleanExpression) -> Any:
    """Return an expression as a JSON document, or None if it cannot be serialized."""
    dump = getattr(expression, "model_dump", None)
    return None if dump is None else dump(mode="json")


def plan_scan(call: Call) -> JsonResponse:
    """Plan a scan of a table, completely within this request."""
    planner = Planner(_table(call), call.document(), call.limits.scan_files)
    completed = {"status": "completed"}
    return JsonResponse(200, scan_document(planner.whole(), planner.metadata, planner.stats_fields, completed))


def fetch_tasks(call: Call) -> JsonResponse:
    """Return the files of a part of a scan, or smaller parts if it has too many files."""
    table, part = _table(call), part_of(call.model(FetchScanTasksRequest).plan_task)
    check_is_of(part, table)
    # A scan of the current snapshot stays on the snapshot that was current when it was planned.
    pinned = {} if "end-snapshot-id" in part.request else {"snapshot-id": part.snapshot_id}
    try:
        planner = Planner(table, {**part.request, **pinned}, call.limits.scan_files)
    except RejectedError as error:
        raise no_such_task() from error
    return JsonResponse(200, scan_document(planner.part(part), planner.metadata, planner.stats_fields))


def no_such_plan(call: Call) -> JsonResponse:
    """Report that a plan does not exist: every plan is completed within its request, and no plan is stored."""
    _table(call)
    raise RejectedError(
        404, "NoSuchPlanIdException", "Plan does not exist: this server completes plans at once and stores none"
    )


def _table(call: Call) -> Table:
    requested = call.requested_table()
    return requested.catalog.load_defined(*call.table, requested.definition)
