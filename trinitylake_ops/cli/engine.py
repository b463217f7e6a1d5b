"""The engine for the bulk of a command's requests: ``--engine`` and its other options."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from trinitylake_ops.cli.context import C, Number
from trinitylake_ops.operations.executor import LOCAL, Executor

if TYPE_CHECKING:
    from trinitylake_ops.iceberg.write.rewrite import GroupWriter

#: Set by ``spark-submit`` for the program that it starts.
_SUBMITTED = "PYSPARK_GATEWAY_PORT"
# The place where a command keeps options of Spark until it uses the engine.
_GIVEN = f"{__name__}.given"


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine that was asked for."""

    name: str
    master: str | None
    remote: str | None
    requests_per_second: float | None

    def check(self) -> None:
        """Raise UsageError for options of Spark with another engine, and for two addresses of Spark."""
        options = (self.master, self.remote, self.requests_per_second)
        if self.name == "local" and any(option is not None for option in options):
            raise click.UsageError(
                "--spark-master, --spark-remote and --spark-requests-per-second go with --engine spark"
            )
        if self.master is not None and self.remote is not None:
            raise click.UsageError("--spark-master and --spark-remote exclude each other")

    @contextmanager
    def executor(self) -> Iterator[Executor]:
        """Provide the executor for a block. A Spark session starts with it and stops at its end, even after an error.

        Raises what ``spark_executor`` raises.
        """
        if self.name == "local":
            yield LOCAL
            return
        # Spark takes a second to load, which other commands should not pay for.
        from trinitylake_ops.spark import spark_executor

        with spark_executor(
            self._master(), remote=self.remote, requests_per_second=self.requests_per_second
        ) as executor:
            yield executor

    @contextmanager
    def group_writer(self) -> Iterator[GroupWriter]:
        """Provide the writer of groups of data files for a block: this process, or tasks of Spark."""
        if self.name == "local":
            from trinitylake_ops.iceberg.write.rewrite import rewrite_in_process

            yield rewrite_in_process
            return
        from trinitylake_ops.spark import session_scope, write_groups_on

        with session_scope(master=None if self.remote is not None else self._master(), remote=self.remote) as spark:
            yield write_groups_on(spark)

    def _master(self) -> str | None:
        from trinitylake_ops.spark.runtime.addresses import DEFAULT_MASTER

        return self.master if self.master is not None or _SUBMITTED in os.environ else DEFAULT_MASTER


def engine_options(command: C) -> C:
    """Add ``--engine`` and its options to a command, as the argument ``engine``."""

    def gather(context: click.Context, option: click.Parameter, name: str) -> Engine:
        given: dict[str, Any] = context.meta.get(_GIVEN, {})
        return Engine(
            name, given.get("spark_master"), given.get("spark_remote"), given.get("spark_requests_per_second")
        )

    def keep(context: click.Context, option: click.Parameter, value: Any) -> None:
        context.meta.setdefault(_GIVEN, {})[option.name] = value

    command = click.option(
        "--spark-requests-per-second",
        type=Number(0, 1_000_000, min_open=True),
        metavar="N",
        is_eager=True,
        expose_value=False,
        callback=keep,
        help="All tasks of Spark together send no more requests than that.",
    )(command)
    command = click.option(
        "--spark-remote",
        metavar="URL",
        is_eager=True,
        expose_value=False,
        callback=keep,
        help="A server of Spark Connect that runs the tasks instead, such as sc://host:15002.",
    )(command)
    command = click.option(
        "--spark-master",
        metavar="URL",
        is_eager=True,
        expose_value=False,
        callback=keep,
        help="Where Spark runs, such as spark://host:7077; default: what spark-submit says, else two threads here.",
    )(command)
    return click.option(
        "--engine",
        type=click.Choice(["local", "spark"]),
        default="local",
        show_default=True,
        callback=gather,
        help="The engine that reads, writes and deletes files: threads of this process, or tasks of Spark, for many"
        " files on a storage far away. Plans, digests and reports are the same.",
    )(command)
