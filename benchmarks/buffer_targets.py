"""What single-table commits write in a steady state, by the target size of node buffers.

Run from the project's root: ``.venv/bin/python -m benchmarks.buffer_targets``. It writes
``benchmarks/results/buffer_targets.md`` and its plot.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from benchmarks.lakes import MadeUpDefinitions, change_tables, loaded
from benchmarks.report import Spread, plot, table, write_result
from trinitylake_ops import Lakehouse
from trinitylake_ops.storage import MemoryStorage, MeteredStorage, drop_memory_root
from trinitylake_ops.tree import node

TABLE_COUNTS = (7_000, 16_000, 100_000, 1_000_000)
TARGETS_KIB = (16, 24, 32, 48, 64, 96)
N_COMMITS = 1_500
N_SETTLING = 1_000  # commits of 20 tables, followed by the same number of single-table commits

#: Nodes and kB written per commit, by number of tables and buffer target.
Measurements = Mapping[tuple[int, int], tuple[Spread, Spread]]


def measure(n_tables: int) -> dict[tuple[int, int], tuple[Spread, Spread]]:
    """Measure all targets, one after another, on one lakehouse."""
    storage = MadeUpDefinitions(MemoryStorage(f"memory://targets-{n_tables}/"))
    loaded(storage, n_tables)
    meter = MeteredStorage(storage)
    lake = Lakehouse(meter, cache="private")
    generator = random.Random(n_tables)
    measurements = {}
    for target_kib in TARGETS_KIB:
        node.DEFAULT_BUFFER_TARGET_BYTES = 1024 * target_kib
        for n_changed in (20, 1):
            for _ in range(N_SETTLING):
                change_tables(lake, {generator.randrange(n_tables) for _ in range(n_changed)})
        nodes, kilobytes = [], []
        for _ in range(N_COMMITS):
            with meter.measure() as measurement:
                change_tables(lake, [generator.randrange(n_tables)])
            nodes.append(measurement.counts.requests["create"] - 2)  # without the definition and the root
            kilobytes.append(measurement.counts.bytes_written / 1000)
        measurements[n_tables, target_kib] = Spread.of(nodes), Spread.of(kilobytes)
    drop_memory_root(storage.root)
    print(f"{n_tables:,} tables done", flush=True)
    return measurements


def draw(axes: Sequence[Axes], measurements: Measurements) -> None:
    """Draw nodes and kB by target."""
    for metric, (chart, title) in enumerate(zip(axes, ("nodes per commit", "kB per commit"), strict=True)):
        for n_tables in TABLE_COUNTS:
            means = [measurements[n_tables, target_kib][metric].mean for target_kib in TARGETS_KIB]
            chart.plot(TARGETS_KIB, means, "o-", label=f"{n_tables:,} tables", markersize=3.5)
        chart.axhline((0.5, 110)[metric], color="black", linestyle=":", label="bound")
        chart.set_ylim(bottom=0)
        chart.set_xlabel("target, KiB")
        chart.set_title(title)
        chart.legend()


def main() -> None:
    """Measure, print and write the results."""
    measurements: dict[tuple[int, int], tuple[Spread, Spread]] = {}
    for n_tables in TABLE_COUNTS:
        measurements |= measure(n_tables)
    write_result(
        "buffer_targets",
        [
            "# Buffer targets",
            "",
            f"Made by `benchmarks/buffer_targets.py`: default settings except for the target;"
            f" {N_COMMITS:,} commits of one random table each, after the buffers have reached their steady state."
            " Cells contain the mean number of nodes and kB written per commit, with p99 in parentheses.",
            "",
            *table(
                ["target", *(f"{n_tables:,} tables" for n_tables in TABLE_COUNTS)],
                (
                    [f"{target_kib} KiB", *(_cell(*measurements[n_tables, target_kib]) for n_tables in TABLE_COUNTS)]
                    for target_kib in TARGETS_KIB
                ),
            ),
            "",
            plot("buffer_targets", lambda axes: draw(axes, measurements), 2),
        ],
    )


def _cell(nodes: Spread, kilobytes: Spread) -> str:
    return f"{nodes.mean:.2f} ({nodes.p99:.0f}), {kilobytes.mean:.0f} kB ({kilobytes.p99:.0f})"


if __name__ == "__main__":
    main()
