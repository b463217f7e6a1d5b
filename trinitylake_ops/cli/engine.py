"""The engine for the bulk of a command's requests: ``--engine`` and its other options."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click

from trinitylake_ops.cli.context import C, Number
from trinitylake_ops.operations.executor import LOCAL, Executor

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

    @contextmanager
    def executor(self) -> Iterator[Executor]:
        """Provide the executor for a block. A Spark session starts with it and stops at its end, even after an error.

        Raises UsageError for options of Spark with another engine, and what ``spark_executor`` raises.
        """
        if self.name == "local":
            if any(given is not None for given in (self.master, self.remote, self.requests_per_second)):
                raise click.UsageError(
                    "--spark-master, --spark-remote and --spark-requests-per-second go with --engine spark"
                )
            yield LOCAL
            return
        if self.master is not None and self.remote is not None:
            raise click.UsageError("--spark-master and --spark-remote exclude each other")
        # Spark takes a second to load, which other commands should not pay for.
        from trinitylake_ops.spark import spark_executor
        from trinitylake_ops.spark.runtime.addresses import DEFAULT_MASTER

        master = self.master if self.master is not None or _SUBMITTED in os.environ else DEFAULT_MASTER
        with spark_executor(master, remote=self.remote, requests_per_second=self.requests_per_second) as executor:
            yield executor


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
        help="The engine that reads and deletes files: threads of this process, or tasks of Spark, for many files on a"
        " storage far away. Plans, digests and reports are the same.",
    )(command)
