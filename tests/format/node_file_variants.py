"""Encode node files as other writers do, in each variant that the format allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pyarrow as pa

from trinitylake_ops.format.keys import LAKEHOUSE_DEF, N_KEYS
from trinitylake_ops.format.node_file import NodeFile

Row = tuple[str | None, str | None, str | None]


@dataclass(frozen=True)
class NodeFileVariant:
    """One combination of the differences between writers. The defaults are those of this package.

    Only a leaf can be written without the pnode column, or without the row that has no key.
    """

    value_column: str = "pvalue"
    has_pnode: bool = True
    has_null_row: bool = True
    n_blank: int = 2  # the number of blank pointer rows
    txn: str = ""  # the type of an additional column ``txn``
    strings: str = "string"
    batch_rows: int = 10_000
    compression: str | None = None
    definition_key: str = LAKEHOUSE_DEF

    def supports(self, node: NodeFile) -> bool:
        return node.is_leaf or (self.has_pnode and self.has_null_row)

    def encode(self, node: NodeFile) -> bytes:
        """Encode a node that this variant can represent."""
        assert self.supports(node)
        return arrow_file(
            self._rows(node), self.columns, self.strings, self.batch_rows, self.compression, self.txn or None
        )

    @property
    def columns(self) -> list[str]:
        return ["key", self.value_column, *(["pnode"] if self.has_pnode else [])]

    def _rows(self, node: NodeFile) -> list[Row]:
        system = {**node.system, N_KEYS: str(len(node.keys))}
        if LAKEHOUSE_DEF in system:
            system = {self.definition_key: system.pop(LAKEHOUSE_DEF), **system}
        pointers: list[str | None] = [*node.children] or [None] * (len(node.keys) + 1)
        first, *children = pointers
        return [
            *((name, value, None) for name, value in system.items()),
            *([(None, None, first)] if self.has_null_row else []),
            *zip(node.keys, node.values, children, strict=True),
            *([(None, None, None)] * self.n_blank if self.has_null_row else []),
            *((key, value, None) for key, value in node.buffer.items()),
        ]


def arrow_file(
    rows: list[Row],
    columns: list[str],
    strings: str = "string",
    batch_rows: int = 10_000,
    compression: str | None = None,
    txn: str | None = None,
) -> bytes:
    """Return an Arrow IPC file with the columns of these rows. The rows need not be valid."""
    kinds: dict[str, Any] = {"string": pa.utf8(), "large_string": pa.large_utf8()}
    arrays = [pa.array([row[position] for row in rows], kinds[strings]) for position in range(len(columns))]
    table = pa.table(arrays, columns)
    if txn is not None:
        ids = pa.array(["txn-1" if txn == "string" else 1] * len(rows), txn)
        table = table.add_column(0 if txn == "int64" else len(columns), "txn", ids)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table, max_chunksize=batch_rows)
    return bytes(sink.getvalue())


def all_variants() -> Iterator[NodeFileVariant]:
    """Yield all combinations."""
    for values in product(
        ("pvalue", "value"),
        (True, False),
        (True, False),
        (0, 2),
        ("", "string", "int64"),
        ("string", "large_string"),
        (10_000, 3),
        (None, "lz4", "zstd"),
        (LAKEHOUSE_DEF, "lakehouse"),
    ):
        yield NodeFileVariant(*values)
