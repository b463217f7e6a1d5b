"""ORC files are read in a separate process, so a crash there does not affect the caller."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import orc

from tests.fuzz.decoders import regressions
from trinitylake_ops.iceberg.validation import orc_process
from trinitylake_ops.iceberg.validation.orc_process import column_in_process

KEYS = pa.table({"key": [f"k{number}" for number in range(1_000)], "size": range(1_000)})


def orc_file(table: pa.Table, **options: Any) -> io.BytesIO:
    sink = io.BytesIO()
    orc.write_table(table, sink, **{"stripe_size": 4096, **options})
    return io.BytesIO(sink.getvalue())


def child_process_ids() -> set[str]:
    return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())


def test_column_is_read_in_separate_process() -> None:
    batches = list(column_in_process(orc_file(KEYS), "key"))
    assert pa.Table.from_batches(batches) == KEYS.select(["key"])


def test_process_crash_raises_error() -> None:
    (data,) = regressions("inventory_orc").values()
    with pytest.raises(ValueError, match="ended with signal"):
        list(column_in_process(io.BytesIO(data), "key"))


@pytest.mark.parametrize(("data", "reason"), [(b"", "zero"), (b"ORC", "not an ORC"), (b"x" * 100, "ORC")])
def test_invalid_orc_file_raises_error(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=f"(?i){reason}|postscript|size"):
        list(column_in_process(io.BytesIO(data), "key"))


def test_missing_column_raises_error() -> None:
    with pytest.raises(ValueError, match="other"):
        list(column_in_process(orc_file(KEYS), "other"))


def test_exceeding_memory_limit_raises_error() -> None:
    """The stripe compresses well, so the file is small."""
    rows = pa.table({"key": pa.chunked_array([["x" * 1_000_000]] * 1_200)})
    with pytest.raises((ValueError, pa.ArrowException)):
        list(column_in_process(orc_file(rows, stripe_size=2 << 30, compression="zstd"), "key"))


def test_closed_reader_leaves_no_process_or_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orc_process.tempfile, "tempdir", str(tmp_path))
    before = child_process_ids()
    batches = column_in_process(orc_file(KEYS), "key")
    next(batches)
    batches.close()
    assert child_process_ids() == before
    assert list(tmp_path.iterdir()) == []
