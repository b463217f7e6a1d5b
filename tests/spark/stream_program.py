"""Run a streaming write: ``python -m tests.spark.stream_program FROM_ROOT TO_ROOT CHECKPOINT``."""

from __future__ import annotations

import sys

from trinitylake_ops.spark.session import session_scope


def main(source: str, target: str, checkpoint: str) -> None:
    """Copy the rows appended to ``ns.t`` since the last run, with one version per batch, and exit."""
    with session_scope() as spark:
        frame = spark.readStream.format("trinitylake").option("root", source).option("max_versions", 1).load("ns.t")
        writer = frame.writeStream.format("trinitylake").option("root", target).option("stream_id", "copy")
        writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start("ns.copy").awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
