"""The option ``--engine`` and its related options."""

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

#: Set by ``spark-submit`` for the program that it runs.
_SUBMITTED = "PYSPARK_GATEWAY_PORT"
# The key under which the click context stores Spark options until the engine is created.
_SPARK_OPTIONS = f"{__name__}.spark_options"


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine selected on the command line."""

    name: str
    master: str | None
    remote: str | None
    requests_per_second: float | None

    def check(self) -> None:
        """Raise UsageError for Spark options without the Spark engine, and for two Spark addresses."""
        options = (self.master, self.remote, self.requests_per_second)
        if self.name == "local" and any(option is not None for option in options):
            raise click.UsageError("--spark-master, --spark-remote and --spark-requests-per-second need --engine spark")
        if self.master is not None and self.remote is not None:
            raise click.UsageError("--spark-master and --spark-remote cannot be combined")

    @contextmanager
    def executor(self) -> Iterator[Executor]:
        """Provide the executor for a block. A Spark session starts with the block, and stops at its end or on an error.

        Raises the errors of ``spark_executor``.
        """
        if self.name == "local":
            yield LOCAL
            return
        # importing Spark takes a second, which other commands should not pay for
        from trinitylake_ops.spark import spark_executor

        with spark_executor(
            self._master(), remote=self.remote, requests_per_second=self.requests_per_second
        ) as executor:
            yield executor

    @contextmanager
    def group_writer(self) -> Iterator[GroupWriter]:
        """Provide the writer of data file groups for a block: this process, or Spark tasks."""
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

    def build_engine(context: click.Context, option: click.Parameter, name: str) -> Engine:
        options: dict[str, Any] = context.meta.get(_SPARK_OPTIONS, {})
        return Engine(
            name, options.get("spark_master"), options.get("spark_remote"), options.get("spark_requests_per_second")
        )

    def store_option(context: click.Context, option: click.Parameter, value: Any) -> None:
        context.meta.setdefault(_SPARK_OPTIONS, {})[option.name] = value

    command = click.option(
        "--spark-requests-per-second",
        type=Number(0, 1_000_000, min_open=True),
        metavar="N",
        is_eager=True,
        expose_value=False,
        callback=store_option,
        help="Maximum number of requests per second of all Spark tasks together.",
    )(command)
    command = click.option(
        "--spark-remote",
        metavar="URL",
        is_eager=True,
        expose_value=False,
        callback=store_option,
        help="Run the tasks on this Spark Connect server, such as sc://host:15002.",
    )(command)
    command = click.option(
        "--spark-master",
        metavar="URL",
        is_eager=True,
        expose_value=False,
        callback=store_option,
        help="The Spark master, such as spark://host:7077. Default: that of spark-submit, otherwise two local threads.",
    )(command)
    return click.option(
        "--engine",
        type=click.Choice(["local", "spark"]),
        default="local",
        show_default=True,
        callback=build_engine,
        help="Where files are read, written and deleted: in threads of this process, or in Spark tasks, which pay off"
        " for many"
        " files on remote storage. Plans, digests and reports are the same.",
    )(command)
