"""Patches of PyIceberg: nested columns keep their nulls, and Parquet files of a lakehouse get checksums.

PyIceberg 0.11 and 0.12 rebuild a list or map of structs only from its offsets, so that nulls become empty lists or maps
when rows are read or written (apache/iceberg-python issue 3833). They also cast the outer of two nested lists or maps
without the projected values of the inner list or map, so that a renamed nested field loses its values.

The fix replaces two methods of PyIceberg's projection if a probe detects the fault. It is applied when
``pyiceberg.io.pyarrow`` is imported, which is an expensive module. Remove this module when every supported PyIceberg
passes the probe.

``Table.append``, ``overwrite`` and ``delete`` write data through the writer in PyIceberg's registry of file formats,
the only place where page checksums and key-value pairs of the footer can be configured. PyIceberg 0.11 has no registry
and creates Arrow's writer directly, so its reference to ``pyarrow.parquet`` is replaced instead. Files of other FileIOs
are written unchanged.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from pyiceberg.io import OutputFile
from pyiceberg.manifest import FileFormat
from pyiceberg.schema import Schema
from pyiceberg.typedef import Properties
from pyiceberg.types import IntegerType, ListType, MapType, NestedField, StructType

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.io.fileformat import FileFormatModel, FileFormatWriter

_MODULE = "pyiceberg.io.pyarrow"


def keep_nested_nulls() -> None:
    """Fix PyIceberg's projection, now or when its module is imported. Later calls do nothing."""
    if _MODULE in sys.modules:
        _fix(importlib.import_module(_MODULE))  # waits for another thread that is importing the module
    elif not any(isinstance(finder, _PatchOnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PatchOnImport())


class _PatchOnImport(MetaPathFinder):
    """Finds the module with the other finders, and fixes it after it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _FixingLoader(spec.loader)
                return spec
        return None


class _FixingLoader(Loader):
    def __init__(self, loader: Loader):
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _fix(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _fix(module: Any) -> None:
    if not _keeps_nested(module):
        module.ArrowProjectionVisitor.list = _project_list
        module.ArrowProjectionVisitor.map = _project_map


def _project_list(visitor: Any, list_type: ListType, lists: pa.Array | None, values: pa.Array | None) -> Any:
    """Return lists with projected values, or None for an array that is not a list."""
    import pyarrow as pa

    if not isinstance(lists, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray) or values is None:
        return None
    values = visitor._cast_if_needed(list_type.element_field, values)
    element = visitor._construct_field(list_type.element_field, values.type)
    if isinstance(lists, pa.FixedSizeListArray):
        fixed = _with_child(lists, pa.list_(element, lists.type.list_size), values)
        return fixed.cast(pa.list_(element))
    is_large = isinstance(lists, pa.LargeListArray)
    return _with_child(lists, pa.large_list(element) if is_large else pa.list_(element), values)


def _project_map(
    visitor: Any, map_type: MapType, maps: pa.Array | None, keys: pa.Array | None, values: pa.Array | None
) -> Any:
    """Return maps with projected keys and values, or None for an array that is not a map."""
    import pyarrow as pa

    if not isinstance(maps, pa.MapArray) or keys is None or values is None:
        return None
    keys = visitor._cast_if_needed(map_type.key_field, keys)
    values = visitor._cast_if_needed(map_type.value_field, values)
    kind = pa.map_(
        visitor._construct_field(map_type.key_field, keys.type),
        visitor._construct_field(map_type.value_field, values.type),
    )
    entries = pa.StructArray.from_arrays([keys, values], fields=[kind.key_field, kind.item_field])
    return _with_child(maps, kind, entries)


def _with_child(array: pa.Array, kind: pa.DataType, child: pa.Array) -> pa.Array:
    """Return an array with another child of the same length. Its nulls, offsets and slice are unchanged."""
    import pyarrow as pa

    n_buffers = 1 if isinstance(array, pa.FixedSizeListArray) else 2
    buffers = array.buffers()[:n_buffers]
    return pa.Array.from_buffers(kind, len(array), buffers, offset=array.offset, children=[child])


def _keeps_nested(module: Any) -> bool:
    """Whether a projection preserves nulls of lists and maps of structs, and a renamed field in a list of lists."""
    import pyarrow as pa

    def schema(name: str) -> Schema:
        element = StructType(NestedField(9, name, IntegerType(), required=False))
        value = StructType(NestedField(8, name, IntegerType(), required=False))
        inner = ListType(7, StructType(NestedField(6, name, IntegerType(), required=False)), element_required=False)
        return Schema(
            NestedField(1, "list", ListType(4, element, element_required=False), required=False),
            NestedField(2, "map", MapType(5, IntegerType(), 10, value, value_required=False), required=False),
            NestedField(3, "lists", ListType(11, inner, element_required=False), required=False),
        )

    def rows(name: str) -> list[dict[str, Any]]:
        return [{"list": None, "map": None, "lists": None}, {"list": [], "map": [], "lists": [[{name: 1}], None]}]

    before, after = schema("before"), schema("after")
    batch = pa.RecordBatch.from_pylist(rows("before"), module.schema_to_pyarrow(before, include_field_ids=False))
    projected: list[dict[str, Any]] = module._to_requested_schema(after, before, batch).to_pylist()
    return projected == rows("after")


class SealedOutputFile(OutputFile):
    """An output file whose stream fills in the digits of checksums."""


class SealedStream:
    """The stream of such a file, to which PyIceberg writes immediately after creating it."""

    def __init__(self, location: str):
        self.location = location
        if not _HAS_REGISTRY and location.endswith(".parquet"):
            _patch_pyiceberg_0_11()


_HAS_REGISTRY = importlib.util.find_spec("pyiceberg.io.fileformat") is not None


def write_sealed_parquet() -> None:
    """Make PyIceberg write Parquet files with checksums to every SealedOutputFile. Later calls do nothing."""
    if not _HAS_REGISTRY:
        return  # PyIceberg 0.11 is patched when the first file is opened, because its writer module is expensive
    from pyiceberg.io.fileformat import FileFormatFactory

    if not isinstance(FileFormatFactory._registry, _SealingRegistry):
        FileFormatFactory._registry = _SealingRegistry(FileFormatFactory._registry)


class _SealingRegistry(dict[FileFormat, "FileFormatModel"]):
    """Registry of file formats that wraps Parquet, which PyIceberg registers when it first reads or writes rows."""

    def __init__(self, models: Mapping[FileFormat, FileFormatModel]):
        super().__init__()
        for file_format, model in models.items():
            self[file_format] = model

    def __setitem__(self, file_format: FileFormat, model: FileFormatModel) -> None:
        super().__setitem__(file_format, _SealingModel(model) if file_format == FileFormat.PARQUET else model)


class _SealingModel:
    """PyIceberg's Parquet format, with a different writer for files with checksums."""

    def __init__(self, model: FileFormatModel):
        self._model = model

    def create_writer(self, output_file: OutputFile, file_schema: Schema, properties: Properties) -> FileFormatWriter:
        """Return a writer of one file."""
        if not isinstance(output_file, SealedOutputFile):
            return self._model.create_writer(output_file, file_schema, properties)
        from trinitylake_ops.iceberg.io.parquet_writer import SealedParquetWriter  # importing it loads pandas

        return cast("FileFormatWriter", SealedParquetWriter(output_file, file_schema, properties))

    @property
    def format(self) -> FileFormat:
        """The format of the files."""
        return self._model.format

    def file_extension(self) -> str:
        """Return the suffix of file names, without the dot."""
        return self._model.file_extension()

    def add_field_metadata(self, field: NestedField, metadata: dict[bytes, bytes], include_field_ids: bool) -> None:
        """Add the format's properties of a column to ``metadata``."""
        self._model.add_field_metadata(field, metadata, include_field_ids)


def _patch_pyiceberg_0_11() -> None:
    """Make PyIceberg 0.11 use this package's writer for its streams. Later calls do nothing."""
    writers: Any = importlib.import_module("pyiceberg.io.pyarrow")
    if not isinstance(writers.pq, _SealingParquet):
        writers.pq = _SealingParquet(writers.pq)


class _SealingParquet:
    """A replacement for ``pyarrow.parquet`` in PyIceberg 0.11."""

    def __init__(self, module: Any):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def ParquetWriter(self, where: Any, **options: Any) -> Any:  # noqa: N802 - Arrow's name
        """Return a writer of one file."""
        if not isinstance(where, SealedStream):
            return self._module.ParquetWriter(where, **options)
        from trinitylake_ops.iceberg.io.parquet_writer import SealingWriter

        return SealingWriter(where, where.location, **options)
