"""How full to let buffers grow: what commits of one table write at several targets, in a steady state.

Run from the project's root: ``.venv/bin/python -m benchmarks.buffer_targets``; it writes
``benchmarks/results/buffer_targets.md`` and the plot that it shows.
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
N_SETTLING = 1_000  # commits of 20 tables, then as many of one

#: Nodes and kB written by each commit, by number of tables and target.
Found = Mapping[tuple[int, int], tuple[Spread, Spread]]


def written(n_tables: int) -> dict[tuple[int, int], tuple[Spread, Spread]]:
    """Measure all targets, one after the other, on one lakehouse."""
    storage = MadeUpDefinitions(MemoryStorage(f"memory://targets-{n_tables}/"))
    loaded(storage, n_tables)
    meter = MeteredStorage(storage)
    lake = Lakehouse(meter, cache="private")
    generator = random.Random(n_tables)
    found = {}
    for target_kib in TARGETS_KIB:
        node.DEFAULT_BUFFER_TARGET_BYTES = 1024 * target_kib
        for n_changed in (20, 1):
            for _ in range(N_SETTLING):
                change_tables(lake, {generator.randrange(n_tables) for _ in range(n_changed)})
        nodes, kilobytes = [], []
        for _ in range(N_COMMITS):
            with meter.measure() as measurement:
                change_tables(lake, [generator.randrange(n_tables)])
            nodes.append(measurement.counts.requests["create"] - 2)  # besides the definition and the root
            kilobytes.append(measurement.counts.bytes_written / 1000)
        found[n_tables, target_kib] = Spread.of(nodes), Spread.of(kilobytes)
    drop_memory_root(storage.root)
    print(f"{n_tables:,} tables done", flush=True)
    return found


def draw(axes: Sequence[Axes], found: Found) -> None:
    """Draw nodes and kB over the target."""
    for place, (chart, title) in enumerate(zip(axes, ("nodes per commit", "kB per commit"), strict=True)):
        for n_tables in TABLE_COUNTS:
            means = [found[n_tables, target_kib][place].mean for target_kib in TARGETS_KIB]
            chart.plot(TARGETS_KIB, means, "o-", label=f"{n_tables:,} tables", markersize=3.5)
        chart.axhline((0.5, 110)[place], color="black", linestyle=":", label="bound")
        chart.set_ylim(bottom=0)
        chart.set_xlabel("target, KiB")
        chart.set_title(title)
        chart.legend()


def main() -> None:
    """Measure, print and write the results."""
    found: dict[tuple[int, int], tuple[Spread, Spread]] = {}
    for n_tables in TABLE_COUNTS:
        found |= written(n_tables)
    write_result(
        "buffer_targets",
        [
            "# How full a buffer gets",
            "",
            f"Made by `benchmarks/buffer_targets.py`: default settings but for the target, {N_COMMITS:,} commits of one"
            " random table each when buffers are as full as they get. Cells are nodes and kB written per commit,"
            " means; p99 in parentheses.",
            "",
            *table(
                ["target", *(f"{n_tables:,} tables" for n_tables in TABLE_COUNTS)],
                (
                    [f"{target_kib} KiB", *(_cell(*found[n_tables, target_kib]) for n_tables in TABLE_COUNTS)]
                    for target_kib in TARGETS_KIB
                ),
            ),
            "",
            plot("buffer_targets", lambda axes: draw(axes, found), 2),
        ],
    )


def _cell(nodes: Spread, kilobytes: Spread) -> str:
    return f"{nodes.mean:.2f} ({nodes.p99:.0f}), {kilobytes.mean:.0f} kB ({kilobytes.p99:.0f})"


if __name__ == "__main__":
    main()
