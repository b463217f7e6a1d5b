"""Lance: objects are rows of a dataset."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable

import lance
import pyarrow as pa

from benchmarks.peers.peer import Peer, object_name, value


class LanceConflictError(Exception):
    """A commit conflict after Lance's own retries, which Lance reports only in the message of an OSError."""


class LanceUpdate(Peer):
    """An update of one row."""

    packages = ("pylance",)
    object_kind = "row"
    commit_kind = "`LanceDataset.update` of one row, from the version that the writer has open"
    durability = "nothing is synced (no fsync in a trace of its system calls)"
    conflicts = (LanceConflictError,)

    def _uri(self) -> str:
        return (
            f"{self.location.uri}objects.lance"
            if self.location.endpoint
            else str(self.location.folder / "objects.lance")
        )

    def _options(self) -> dict[str, str] | None:
        options = self.location.s3_options(
            endpoint="aws_endpoint", key="aws_access_key_id", secret="aws_secret_access_key", region="aws_region"
        )
        return {**options, "allow_http": "true"} if options else None

    def _cold(self, version: int | None = None) -> lance.LanceDataset:
        return lance.dataset(self._uri(), version=version, storage_options=self._options())

    def load(self, n_objects: int) -> None:
        self._dataset = lance.write_dataset(_rows(range(n_objects)), self._uri(), storage_options=self._options())

    def attach(self) -> None:
        self._dataset = self._cold()

    def commit(self, number: int) -> None:
        self._change(self._dataset, number)

    @staticmethod
    def _change(dataset: lance.LanceDataset, number: int) -> None:
        dataset.update({"definition": f"'{value(number)}'"}, where=f"name = '{object_name(number)}'")

    def writer(self) -> Callable[[int], None]:
        dataset = self._cold()

        def commit(number: int) -> None:
            try:
                self._change(dataset, number)
            except OSError as error:
                if "conflict" not in str(error):
                    raise
                raise LanceConflictError(str(error)) from error

        return commit

    def lookup(self, number: int) -> str:
        return _value(self._cold(), number)

    def list(self) -> int:
        return len(self._cold().to_table(columns=["name"])["name"].to_pylist())

    def version(self) -> object:
        return self._dataset.version

    def old_version(self, version: object, number: int) -> str:
        assert isinstance(version, int)
        return _value(self._cold(version), number)

    def expire(self) -> None:
        self._cold().cleanup_old_versions(older_than=dt.timedelta(0))


class LanceAppend(LanceUpdate):
    """An append of one row."""

    commit_kind = "`LanceDataset.insert` of one row, without a change of existing rows"

    @staticmethod
    def _change(dataset: lance.LanceDataset, number: int) -> None:
        dataset.insert(_rows([number]))


def _rows(numbers: range | list[int]) -> pa.Table:
    names = [object_name(number) for number in numbers]
    return pa.table({"name": names, "definition": [value(number) for number in numbers]})


def _value(dataset: lance.LanceDataset, number: int) -> str:
    rows = dataset.to_table(columns=["definition"], filter=f"name = '{object_name(number)}'")
    return str(rows["definition"][0])
