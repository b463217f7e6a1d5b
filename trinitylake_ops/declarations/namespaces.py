"""Operations on namespaces, and the resolution of commits whose response was lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from trinitylake_ops import operations
from trinitylake_ops.declarations.operation import (
    CommandResult,
    CommandSpec,
    Committed,
    OperationContext,
    ReportingContext,
    direct,
    report_entries,
)
from trinitylake_ops.declarations.options import (
    ARGUMENT,
    CommandLine,
    NamespaceText,
    Options,
    PropertyTexts,
    VersionNumber,
)
from trinitylake_ops.declarations.planned import PlanDeclaration, PlannedOptions
from trinitylake_ops.declarations.rendering import listing
from trinitylake_ops.declarations.texts import parse_properties
from trinitylake_ops.operations.rendering import Table, new_table
from trinitylake_ops.transaction.publish import CommitResolution

if TYPE_CHECKING:
    from trinitylake_ops.format.definitions import NamespaceDef
    from trinitylake_ops.operations import CommitReport, DropNamespacePlan


class CreateNamespaceOptions(Options):
    """Options for creating a namespace: its name and its properties."""

    namespace: Annotated[NamespaceText, ARGUMENT] = Field(description="Name of the namespace.")
    properties: PropertyTexts = Field(default=[], description="Properties of the namespace, each as NAME=VALUE.")


@dataclass(frozen=True)
class CreatedNamespace:
    """A namespace, and the version that created it."""

    version: int
    definition: NamespaceDef


def _create(run: OperationContext[CreateNamespaceOptions]) -> CreatedNamespace:
    options = run.options
    with run.lake.transaction() as txn:
        definition = txn.create_namespace(options.namespace, parse_properties(options.properties, "properties"))
    assert txn.committed_version is not None
    return CreatedNamespace(txn.committed_version, definition)


def _report_created(run: ReportingContext[CreateNamespaceOptions], report: CreatedNamespace) -> None:
    name = run.options.namespace
    run.report(f"version {report.version} has namespace {name}", {"namespace": name}, committed="create-namespace")


def _created_result(
    run: OperationContext[CreateNamespaceOptions], _plan: None, report: CreatedNamespace
) -> CommandResult:
    name = run.options.namespace
    details = {"namespace": name, "definition": report.definition}
    return CommandResult(shown=Committed(version=report.version, line=f"Created namespace {name}", details=details))


CREATE_NAMESPACE = direct(
    job="create_namespace",
    description="Creates a namespace.",
    options=CreateNamespaceOptions,
    execute=_create,
    report=_report_created,
    command=CommandSpec(result=_created_result),
)


class DropNamespaceOptions(PlannedOptions):
    """Options for dropping a namespace: its name, and whether to drop its tables."""

    namespace: Annotated[NamespaceText, ARGUMENT] = Field(description="Name of the namespace.")
    cascade: bool = Field(default=False, description="Also drop its tables.")


def _drop_metadata(plan: DropNamespacePlan) -> dict[str, Any]:
    return {"tables": len(plan.tables), "plan": listing(("table",), [(table,) for table in plan.tables])}


def _report_drop(run: ReportingContext[Any], _plan: DropNamespacePlan | None, report: CommitReport) -> None:
    name = run.options.namespace
    message = f"namespace {name} was dropped in version {report.version}"
    run.report(message, {"dropped": name, **report_entries(report.to_dict())}, committed="drop-namespace")


def _drop_result(run: OperationContext[Any], plan: DropNamespacePlan, report: CommitReport) -> CommandResult:
    line = f"Dropped namespace {run.options.namespace}"
    return CommandResult(shown=Committed(version=report.version, line=line, details={"tables": plan.tables}))


DROP_NAMESPACE: PlanDeclaration[DropNamespaceOptions, DropNamespacePlan, CommitReport] = PlanDeclaration(
    name="drop_namespace",
    description="Drops a namespace from the latest version. Older versions keep it, so a rollback restores it.",
    options=DropNamespaceOptions,
    plan=lambda run: operations.plan_drop_namespace(run.lake, run.options.namespace, run.options.cascade),
    plan_metadata=_drop_metadata,
    execute=lambda _run, plan, digest: plan.execute(approved_digest=digest),
    report=_report_drop,
    command=CommandSpec(result=_drop_result),
)


class ResolveCommitOptions(Options):
    """Options for resolving a commit: the commit, and whether to force a final outcome."""

    version: Annotated[VersionNumber, CommandLine(metavar="VERSION", is_argument=True)] = Field(
        description="The version that the commit's error names."
    )
    commit_id: Annotated[str, ARGUMENT] = Field(description="The id that the commit's error names.")
    fence: bool = Field(
        default=False, description="If the outcome is undecided, make it final by committing an empty version."
    )


@dataclass(frozen=True)
class ResolvedCommit:
    """The outcome of a commit."""

    version: int
    commit_id: str
    resolution: CommitResolution

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome."""
        return {"version": self.version, "commit_id": self.commit_id, "resolution": self.resolution}

    def table(self) -> Table:
        """Return the outcome as one line."""
        return new_table(f"Commit {self.commit_id} as version {self.version}: {self.resolution}")


def _resolve(run: OperationContext[ResolveCommitOptions]) -> ResolvedCommit:
    options = run.options
    resolution = run.lake.resolve_commit(options.version, options.commit_id, fence=options.fence)
    return ResolvedCommit(options.version, options.commit_id, resolution)


def _report_resolved(run: ReportingContext[ResolveCommitOptions], report: ResolvedCommit) -> None:
    run.report(report.table().title, {"resolution": str(report.resolution)})


RESOLVE_COMMIT = direct(
    job="resolve_commit",
    description="Shows the outcome of a commit whose response was lost: committed, lost or undecided.",
    options=ResolveCommitOptions,
    execute=_resolve,
    report=_report_resolved,
    command=CommandSpec(
        result=lambda _run, _plan, report: CommandResult(
            shown=report, is_complete=report.resolution == CommitResolution.COMMITTED
        )
    ),
)
