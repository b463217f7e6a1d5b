"""An independent reader and writer of lakehouses, based only on the specification of the format without our extensions.

It lists the tables of the latest version, commits tables by create-if-absent, and rolls back as specified: it writes a
new root that is "most identical" to the old one and names the root that was rolled back from.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping

import mmh3
import pyarrow as pa

from trinitylake_ops.format import definitions_pb2 as pb
from trinitylake_ops.storage import Storage

Row = tuple[str | None, str | None, str | None]
SCHEMA = pa.schema([("key", pa.utf8()), ("pvalue", pa.utf8()), ("pnode", pa.utf8())])


class ForeignLake:
    """A lakehouse as another program reads and writes it.

    Args:
        storage: The storage of the lakehouse.
        behind_ms: How far the clock of the program is behind, so that a version can be older than the previous one.
            None: the clock is correct, and times always increase.
    """

    def __init__(self, storage: Storage, behind_ms: int | None = None):
        self.storage = storage
        self.behind_ms = behind_ms

    def root(self, version: int) -> str:
        return f"_{f'{version:032b}'[::-1]}.arrow"

    def latest(self) -> int:
        hint = self.storage.read("_latest_hint.txt") if self.storage.exists("_latest_hint.txt") else b"0"
        version = int(hint) if hint.isdigit() and self.storage.exists(self.root(int(hint))) else 0
        while self.storage.exists(self.root(version + 1)):
            version += 1
        return version

    def rows(self, path: str) -> list[Row]:
        columns = pa.ipc.open_file(self.storage.read(path)).read_all().to_pydict()
        return list(zip(columns["key"], columns["pvalue"], columns["pnode"], strict=True))

    def system(self, rows: list[Row]) -> dict[str, str]:
        first_pointer = next((index for index, row in enumerate(rows) if row[0] is None), len(rows))
        return {key: value for key, value, _ in rows[:first_pointer] if key is not None and value is not None}

    def entries(self, path: str) -> dict[str, str]:
        """Return the locations of a subtree by key. A node overrides its children, and its messages override both."""
        rows, locations = self.rows(path), dict[str, str]()
        first = next(index for index, row in enumerate(rows) if row[0] is None)
        last = first + int(self.system(rows)["n_keys"])
        for _, _, child in rows[first : last + 1]:
            locations |= {} if child is None else self.entries(child)
        for key, value, _ in rows[first + 1 :]:
            if key is not None:
                locations.pop(key, None) if value is None else locations.update({key: value})
        return locations

    def tables(self) -> set[str]:
        """Return the tables of the latest version as ``namespace.table``. This decodes each definition."""
        entries = self.entries(self.root(self.latest()))
        for key, location in entries.items():
            (pb.TableDef if key.startswith("C===") else pb.NamespaceDef).FromString(self.storage.read(location))
        definition = self.definition()
        end = 4 + definition.namespace_name_max_size_bytes
        return {f"{key[4:end].strip()}.{key[end:].strip()}" for key in entries if key.startswith("C===")}

    def definition(self, version: int | None = None) -> pb.LakehouseDef:
        location = self.system(self.rows(self.root(self.latest() if version is None else version)))["lakehouse_def"]
        return pb.LakehouseDef.FromString(self.storage.read(location))

    def commit_table(
        self,
        namespace: str,
        table: str,
        properties: Mapping[str, str] | None = None,
        *,
        keeps_unknown: bool = False,
    ) -> int:
        latest, definition = self.latest(), self.definition()
        sizes = definition.namespace_name_max_size_bytes, definition.table_name_max_size_bytes
        if f"B==={namespace.ljust(sizes[0])}" not in self.entries(self.root(latest)):
            raise KeyError(f"no namespace {namespace}")
        file_name = f"table-{table}-{namespace}-{uuid.uuid4()}.binpb"
        bits = f"{mmh3.hash(file_name, signed=False) & 0xFFFFF:020b}"
        location = f"{bits[:4]}/{bits[4:8]}/{bits[8:12]}/{bits[12:]}-{file_name}"
        table_def = pb.TableDef(id=str(uuid.uuid4()), properties=properties or {})
        self.storage.create(location, table_def.SerializeToString())
        message = (f"C==={namespace.ljust(sizes[0])}{table.ljust(sizes[1])}", location, None)
        return self.commit(latest, [*self.rows(self.root(latest)), message], keeps_unknown=keeps_unknown)

    def rollback(self, version: int, *, keeps_unknown: bool, carries_definition: bool = False) -> int:
        """Commit an earlier version as the latest one, optionally with the current lakehouse definition."""
        latest, rows = self.latest(), self.rows(self.root(version))
        changed = {"rollback_from_root": self.root(latest)}
        if carries_definition:
            changed["lakehouse_def"] = self.system(self.rows(self.root(latest)))["lakehouse_def"]
        unchanged = [row for row in rows if row[0] not in changed]
        new = [(key, value, None) for key, value in changed.items()]
        return self.commit(latest, [*new, *unchanged], keeps_unknown=keeps_unknown)

    def rollback_by_copy(self, version: int) -> int:
        """Commit an earlier version as the latest one by copying its root file byte by byte."""
        latest = self.latest()
        self.storage.create(self.root(latest + 1), self.storage.read(self.root(version)))
        self.storage.write("_latest_hint.txt", str(latest + 1).encode())
        return latest + 1

    def commit(self, latest: int, rows: list[Row], *, keeps_unknown: bool = False) -> int:
        """Write the rows as the next root, without ``commit_id`` and ``commit_info`` unless ``keeps_unknown``."""
        unknown = () if keeps_unknown else ("commit_id", "commit_info")
        current = {"created_at_millis": str(self.now_ms(latest)), "previous_root": self.root(latest)}
        changed = [
            (key, current.get(key or "", value), pnode)
            for key, value, pnode in [*((key, "", None) for key in current), *rows]
            if key not in unknown
        ]
        unique = [row for index, row in enumerate(changed) if row[0] not in current or index < len(current)]
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, SCHEMA) as writer:
            writer.write_batch(pa.record_batch([pa.array(column) for column in zip(*unique, strict=True)], SCHEMA))
        self.storage.create(self.root(latest + 1), sink.getvalue().to_pybytes())
        self.storage.write("_latest_hint.txt", str(latest + 1).encode())
        return latest + 1

    def now_ms(self, latest: int) -> int:
        """Return the time of this program's clock. Without a lag, it is later than the time of the latest version."""
        if self.behind_ms is not None:
            return self.storage.now_ms() - self.behind_ms
        before = self.system(self.rows(self.root(latest)))["created_at_millis"]
        return max(self.storage.now_ms(), int(before) + 1)
