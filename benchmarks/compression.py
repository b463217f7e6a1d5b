"""Measure the savings and costs of compressing node files.

Run from the project's root: ``.venv/bin/python -m benchmarks.compression``. It writes
``benchmarks/results/compression.md`` and its plot. Times are medians; the codecs are measured in turns.
"""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from benchmarks.lakes import GeneratedDefinitions, change_tables, create_loaded_lake
from benchmarks.report import Spread, cpu_seconds, plot, seconds, table, write_result
from trinitylake_ops import Lakehouse
from trinitylake_ops.format.node_file import NODE_COMPRESSIONS, NodeFile, decode_node, encode_node
from trinitylake_ops.storage import MemoryStorage, MeteredStorage
from trinitylake_ops.tree.shape import walk

N_TABLES = 16_000
N_COMMITS = 500
N_TURNS = 400
N_LISTS = 30


@dataclass(frozen=True)
class Codec:
    """A lakehouse whose node files are compressed with one codec, and its measurements."""

    name: str
    lake: Lakehouse
    nodes: Mapping[str, NodeFile]
    tree_bytes: int
    commit_kilobytes: Spread
    encode_s: Mapping[str, list[float]]
    decode_s: Mapping[str, list[float]]
    list_s: list[float]


def measure_commits(name: str) -> Codec:
    """Create a lakehouse, commit until the root's buffer is full, and measure commits."""
    storage = GeneratedDefinitions(MemoryStorage(f"memory://compression-{name or 'none'}/"))
    meter = MeteredStorage(storage)
    create_loaded_lake(meter, N_TABLES, node_compression=name)
    lake = Lakehouse(meter, cache="private")
    generator = random.Random(N_TABLES)
    kilobytes = []
    for _ in range(2 * N_COMMITS):
        with meter.measure() as measurement:
            change_tables(lake, [generator.randrange(N_TABLES)])
        kilobytes.append(measurement.counts.bytes_written / 1000)
    snapshot = lake.snapshot()
    visited = list(walk(snapshot.files.nodes, snapshot.root, snapshot.location))
    leaf = next(located.node for located in visited if located.node.is_leaf)
    kinds = {"root": snapshot.root, "leaf": leaf}
    return Codec(
        name or "none",
        lake,
        kinds,
        sum(located.node.file_size_bytes for located in visited),
        Spread.of(kilobytes[N_COMMITS:]),
        {kind: [] for kind in kinds},
        {kind: [] for kind in kinds},
        [],
    )


def measure_times(codecs: Sequence[Codec]) -> None:
    """Encode and decode nodes, and list all tables cold, with all codecs in turns."""
    for turn in range(N_TURNS):
        for codec in codecs:
            name = "" if codec.name == "none" else codec.name
            order = codec.lake.snapshot().definition.order
            for kind, node in codec.nodes.items():
                data = encode_node(node, order, name)
                codec.encode_s[kind].append(seconds(lambda n=node, o=order, c=name: encode_node(n, o, c)))  # type: ignore[misc]
                codec.decode_s[kind].append(seconds(lambda d=data: decode_node(d, "node")))  # type: ignore[misc]
            if turn < N_LISTS:
                gc.collect()
                storage = codec.lake.storage
                codec.list_s.append(cpu_seconds(lambda s=storage: Lakehouse(s, cache="off").snapshot().tables("ns")))  # type: ignore[misc]


def codec_rows(codecs: Sequence[Codec]) -> list[list[object]]:
    """Return a row for each codec. Times are relative to no compression."""
    plain = codecs[0]

    def ratio(values: Sequence[float], base: Sequence[float]) -> str:
        return f"{statistics.median(values) / statistics.median(base):.2f}"

    rows: list[list[object]] = []
    for codec in codecs:
        sizes = [f"{codec.nodes[kind].file_size_bytes / 1000:.1f}" for kind in ("leaf", "root")]
        times = [
            ratio(getattr(codec, metric)[kind], getattr(plain, metric)[kind])
            for metric in ("encode_s", "decode_s")
            for kind in ("leaf", "root")
        ]
        rows.append(
            [
                codec.name,
                *sizes,
                f"{codec.tree_bytes / 1e6:.2f}",
                *codec.commit_kilobytes.cells(digits=1),
                *times,
                ratio(codec.list_s, plain.list_s),
            ]
        )
    return rows


def draw(axes: Sequence[Axes], codecs: Sequence[Codec]) -> None:
    """Draw the bytes written per commit, and the times to encode and decode a leaf."""
    names = [codec.name for codec in codecs]
    axes[0].bar(names, [codec.commit_kilobytes.mean for codec in codecs])
    axes[0].set_title(f"kB written per commit, {N_TABLES:,} tables")
    for shift, (metric, label) in enumerate((("encode_s", "encode"), ("decode_s", "decode"))):
        times_us = [1e6 * statistics.median(getattr(codec, metric)["leaf"]) for codec in codecs]
        axes[1].bar([number + 0.4 * shift for number in range(len(codecs))], times_us, 0.38, label=label)
    axes[1].set_xticks([number + 0.2 for number in range(len(codecs))], names)
    axes[1].set_title("µs for a leaf")
    axes[1].legend()


def main() -> None:
    """Measure, print and write the results."""
    codecs = [measure_commits(name) for name in NODE_COMPRESSIONS]
    measure_times(codecs)
    write_result(
        "compression",
        [
            "# Compression of node files",
            "",
            f"Generated by `benchmarks/compression.py`: {N_TABLES:,} tables, default settings, storage in memory; kB of"
            f" {N_COMMITS} commits of one random table each, with full buffers. Times are relative to no compression."
            " The list is cold and reads every leaf; its time is CPU time.",
            "",
            *table(
                [
                    "codec",
                    "leaf kB",
                    "root kB",
                    "tree MB",
                    "kB per commit, median",
                    "mean",
                    "p99",
                    "encode leaf",
                    "root",
                    "decode leaf",
                    "root",
                    "list",
                ],
                codec_rows(codecs),
            ),
            "",
            plot("compression", lambda axes: draw(axes, codecs), 2),
        ],
    )


if __name__ == "__main__":
    main()
