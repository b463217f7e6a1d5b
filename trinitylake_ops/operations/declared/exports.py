"""Export of a version, and the repair of the hint."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from trinitylake_ops import maintenance
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.operations.operation import Operation, Running, report_figures
from trinitylake_ops.operations.options import (
    MOST_DAYS,
    ExportText,
    NamespaceTexts,
    NewExportText,
    Options,
    TableTexts,
    TargetText,
    VersionNumber,
)

_MILLISECOND = timedelta(milliseconds=1)
_MOST_NAMED = 10


class PartOptions(Options):
    """The namespaces and tables that an operation is limited to."""

    namespaces: NamespaceTexts = Field(
        default=[], description="Only these namespaces with their tables; empty, and no tables either: everything."
    )
    tables: TableTexts = Field(default=[], description="Only these tables, each as namespace.table.")


class ExportOptions(Options):
    """The version to export, how much of it is copied, the target, and how long to keep it."""

    name: NewExportText = Field(
        description="Name of the export, without spaces and not digits only. The name of an export that was cut off"
        " continues it.",
    )
    level: Literal["minimal", "partial", "full"] = Field(
        default="full",
        description="How much is copied. Minimal: the root alone, which pins all that it needs in this lakehouse."
        " Partial: all nodes of its tree. Full: everything, with the files of managed tables.",
    )
    version: VersionNumber | None = Field(
        default=None, description="The version to export, by its number. Null: the latest."
    )
    target: TargetText | None = Field(
        default=None,
        description="Another root, where the export becomes a separate lakehouse, and later ones copy only what is"
        " new. Null: the export stays in its lakehouse.",
    )
    retain_days: float | None = Field(
        default=None,
        gt=0,
        le=MOST_DAYS,
        allow_inf_nan=False,
        description="Days for which the export keeps its version from expiring. Null: until it is dropped, or for a"
        " full one until it is complete.",
    )
    namespaces: NamespaceTexts = Field(
        default=[], description="Only these namespaces, at the levels partial and full. Empty: all."
    )
    definitions: bool = Field(
        default=False, description="Whether a partial export copies definitions of namespaces and tables as well."
    )

    @field_validator("retain_days")
    @classmethod
    def _check_retained(cls, days: float | None) -> float | None:
        if days is not None and timedelta(days=days) < _MILLISECOND:
            raise InvalidInputError(f"retain_days is {days}, less than a millisecond; leave it out for no end")
        return days

    @model_validator(mode="after")
    def _check_level(self) -> Self:
        if self.namespaces and self.level == "minimal":
            raise InvalidInputError("namespaces: an export of the level minimal has all of them; choose another level")
        if self.definitions and self.level != "partial":
            raise InvalidInputError(f"definitions: the level {self.level} leaves no choice; choose the level partial")
        return self


class ExportNameOptions(Options):
    """The name of an export."""

    name: ExportText = Field(description="Name of the export.")


def named(damaged: Mapping[str, str]) -> str:
    """Return the names of the first damaged tables."""
    return ", ".join(list(damaged)[:_MOST_NAMED])


def _export(run: Running[ExportOptions]) -> None:
    options = run.options
    plan = maintenance.plan_export(
        run.lake,
        options.name,
        options.level,
        None if options.version is None else str(options.version),
        options.target,
        None if options.retain_days is None else timedelta(days=options.retain_days),
        namespaces=options.namespaces,
        definitions=options.definitions,
        executor=run.executor(),
    )
    report = plan.execute(progress=run.progress())
    said = f"export {report.name} holds version {report.version}"
    if not report.is_complete:
        raise run.failure(f"{said} without damaged tables: {named(report.damaged)}", report_figures(report.to_dict()))
    run.report(said, report_figures(report.to_dict()), committed="export")


EXPORT = Operation(
    job="export",
    description="Keeps a version under a name, by copies. An export that was cut off continues.",
    options=ExportOptions,
    step=_export,
    changes_exports=True,
)


def _repair_hint(run: Running[None]) -> None:
    report = maintenance.repair_hint(run.lake)
    run.report(f"the hint was {report.state}", report_figures(report.to_dict()))


REPAIR_HINT = Operation(
    job="repair_hint",
    description="Writes the number of the latest version into the hint file. A wrong hint costs every reader requests.",
    step=_repair_hint,
)
