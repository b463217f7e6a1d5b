"""Test the contract of all plans. Plan classes are discovered, so that new classes are covered."""

import ast
import dataclasses
import inspect
import json
import typing
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.lakes import Lakes
from tests.operations.aging import Aging, keeping
from tests.operations.changes import create
from tests.telemetry.listener import recorded_metrics
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import CommitConflictError, PlanChangedError, TransactionExpiredError, TrinityLakeError
from trinitylake_ops.format.file_names import HINT_PATH, is_immutable_path
from trinitylake_ops.operations.base import Cost, Plan, PlannedOperation
from trinitylake_ops.operations.definition_commits import MAX_ATTEMPTS, commit_on_latest
from trinitylake_ops.operations.executor import Executor, LocalExecutor, Weight
from trinitylake_ops.operations.rendering import Document
from trinitylake_ops.spark.executor import SparkExecutor
from trinitylake_ops.storage import Storage, StorageWrapper
from trinitylake_ops.versions.snapshot import Snapshot

pytestmark = pytest.mark.usefixtures("fixed_requests")


def _plan_restore(lake: Lakehouse, target: str) -> Plan:
    operations.plan_export(lake, "away", "full", target=target).execute()
    return operations.plan_restore(lake, "away")


def _create_export(lake: Lakehouse) -> str:
    operations.plan_export(lake, "kept").execute()
    return "kept"


def _create_clone(lake: Lakehouse, target: str) -> str:
    operations.plan_clone(lake, target, "clone").execute()
    return "clone"


def _create_changed_clone(lake: Lakehouse, target: str) -> str:
    name = _create_clone(lake, target)
    for side in (Lakehouse.open(target), lake):
        create(side, "clone" if side is lake else "parent", "t")
    return name


_PLAN_CLASSES = [
    member
    for name in operations.__all__
    if inspect.isclass(member := getattr(operations, name)) and issubclass(member, Plan)
]
_PLAN_FUNCTIONS: dict[str, Callable[[Lakehouse, str], Plan]] = {
    "ClonePlan": lambda lake, target: operations.plan_clone(lake, target, "clone"),
    "CompactionPlan": lambda lake, _: operations.plan_compact(lake),
    "CompactTablesPlan": lambda lake, _: operations.plan_compact_tables(lake),
    "DropClonePlan": lambda lake, target: operations.plan_drop_clone(
        lake, _create_clone(lake, target), delete_files=True
    ),
    "DropExportPlan": lambda lake, _: operations.plan_drop_export(lake, _create_export(lake)),
    "DropNamespacePlan": lambda lake, _: operations.plan_drop_namespace(lake, "n0", cascade=True),
    "ExpirationPlan": lambda lake, _: operations.plan_expiration(lake, keeping(1)),
    "ExportPlan": lambda lake, _: operations.plan_export(lake, "other"),
    "OrphanPlan": lambda lake, _: operations.plan_orphan_removal(lake),
    "PromotionPlan": lambda lake, target: operations.plan_promotion(lake, _create_changed_clone(lake, target)),
    "PrunePlan": lambda lake, _: operations.plan_prune_exports(lake, "*", keeping(1)),
    "PurgePlan": lambda lake, _: operations.plan_purge(lake),
    "ReconcilePlan": lambda lake, _: operations.plan_reconcile(lake),
    "RefreshPlan": lambda lake, target: operations.plan_refresh(lake, _create_changed_clone(lake, target)),
    "RelocationPlan": lambda lake, _: operations.plan_relocation(lake),
    "RepairPlan": lambda lake, _: operations.plan_repair(lake),
    "RestorePlan": _plan_restore,
    "RollbackPlan": lambda lake, _: operations.plan_rollback(lake, 1),
    "TrimPlan": lambda lake, _: operations.plan_trim_tables(lake, keeping(1)),
}


def test_every_plan_class_is_covered() -> None:
    assert sorted(_PLAN_FUNCTIONS) == sorted(plan.__name__ for plan in _PLAN_CLASSES)


def _concrete_plan_classes(base: type[Plan] = Plan) -> Iterator[type[Plan]]:
    for plan_class in base.__subclasses__():
        yield from (_concrete_plan_classes(plan_class) if inspect.isabstract(plan_class) else [plan_class])


def test_every_plan_class_is_exported() -> None:
    assert {plan.__name__ for plan in _concrete_plan_classes()} == {plan.__name__ for plan in _PLAN_CLASSES}


@pytest.mark.parametrize("plan", _PLAN_CLASSES, ids=lambda plan: plan.__name__)
def test_execute_returns_a_frozen_report_with_its_cost(plan: type[Plan]) -> None:
    assert not inspect.isabstract(plan)
    assert plan.__dataclass_params__.frozen
    report = typing.get_type_hints(plan.execute)["return"]
    assert issubclass(report, Document)
    assert report.__dataclass_params__.frozen
    cost = next(field for field in dataclasses.fields(report) if field.name == "cost")
    assert typing.get_type_hints(report)[cost.name] is Cost
    assert "approved_digest" in inspect.signature(plan.execute).parameters


@pytest.mark.parametrize("name", sorted(_PLAN_FUNCTIONS))
def test_plans_and_reports_are_rendered_and_executions_traced(aging: Aging, lakes: Lakes, name: str) -> None:
    plan = _PLAN_FUNCTIONS[name](aging.lake, lakes.root("away"))
    assert type(plan).__name__ == name
    document = json.loads(json.dumps(plan.to_dict()))
    assert isinstance(plan.is_empty, bool)
    assert document["digest"] == (None if plan.is_empty else plan.digest)
    assert plan.digest.startswith(f"{plan.base_version}-")
    assert str(plan)
    assert json.loads(plan.to_json()) == document
    with recorded_metrics() as metrics:
        with pytest.raises(PlanChangedError):
            plan.execute(approved_digest="0-none")
        report = plan.execute()
    counts = [metrics.added["operations", plan.operation.telemetry_name, outcome] for outcome in ("failed", "done")]
    assert counts == [1, 1]
    assert json.loads(report.to_json())["cost"]["duration_ms"] >= 0
    assert str(report)


_RESOURCE_TYPES = (Lakehouse, Snapshot, Storage, LocalExecutor, SparkExecutor, PlannedOperation)


def _find_resources(value: object, path: str, seen: set[int]) -> Iterator[str]:
    """Yield the parts of a value that are not data: references to a lakehouse, and callables."""
    if id(value) in seen or isinstance(value, type | Enum):
        return
    seen.add(id(value))
    if isinstance(value, _RESOURCE_TYPES) or callable(value):
        yield f"{path}: {type(value).__name__}"
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _find_resources(item, f"{path}[{key!r}]", seen)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _find_resources(item, f"{path}[]", seen)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _find_resources(getattr(value, field.name), f"{path}.{field.name}", seen)
    else:
        for name, item in getattr(value, "__dict__", {}).items():
            yield from _find_resources(item, f"{path}.{name}", seen)


@pytest.mark.parametrize("name", sorted(_PLAN_FUNCTIONS))
def test_plan_is_data_and_its_operation_executes_it(aging: Aging, lakes: Lakes, name: str) -> None:
    plan = _PLAN_FUNCTIONS[name](aging.lake, lakes.root("away"))
    fields = {spec.name: spec for spec in dataclasses.fields(plan)}
    operation = fields.pop("operation")
    assert (operation.repr, operation.compare) == (False, False)
    seen: set[int] = set()
    assert [resource for field in fields for resource in _find_resources(getattr(plan, field), field, seen)] == []
    assert not [field for field in fields if field.startswith("_")]

    operation_class = type(plan.operation)
    assert issubclass(operation_class, PlannedOperation)
    assert operation_class.__dataclass_params__.frozen
    assert not inspect.isabstract(operation_class)
    assert dataclasses.fields(operation_class)[0].name == "lake"
    with mock.patch.object(operation_class, "execute", autospec=True) as execute:
        assert plan.execute(approved_digest="some") is execute.return_value
    operation, *arguments = execute.call_args.args
    assert (type(operation), arguments) == (operation_class, [plan, "some"])
    assert operation.lake is plan.operation.lake


def test_operations_have_distinct_telemetry_names() -> None:
    operation_class = {typing.get_type_hints(plan)["operation"] for plan in _PLAN_CLASSES}
    assert len({operation.telemetry_name for operation in operation_class}) == len(_PLAN_CLASSES)


@pytest.mark.parametrize("name", sorted(_PLAN_FUNCTIONS))
def test_operation_repeats_its_plan(aging: Aging, lakes: Lakes, name: str) -> None:
    plan = _PLAN_FUNCTIONS[name](aging.lake, lakes.root("away"))
    repeated = plan.operation.plan()
    assert (type(repeated), repeated.base_version) == (type(plan), plan.base_version)
    if not hasattr(plan, "now_ms"):
        assert repeated.digest == plan.digest


def test_repair_steps_are_data(aging: Aging) -> None:
    aging.lake.close()
    aging.lake.storage.write(HINT_PATH, b"1")
    plan = operations.plan_repair(aging.lake)
    assert plan.executable_steps
    assert list(_find_resources(plan.executable_steps, "executable_steps", set())) == []


def test_check_for_data_detects_resources(aging: Aging) -> None:
    values = {"a": [aging.lake, aging.lake.snapshot()], "b": (print, aging.lake.storage)}
    assert len(list(_find_resources(values, "values", set()))) == 4


def _defined_names(tree: ast.AST) -> set[str]:
    """Return the names of functions, fields and attributes that a class or module defines."""
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    annotated = [node.target for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)]
    names |= {target.id for target in annotated if isinstance(target, ast.Name)}
    return names | {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }


def _private_reads(path: Path) -> list[str]:
    """Return reads of private attributes that the surrounding class, or the module for functions, does not define."""
    module = ast.parse(path.read_text())
    return [
        f"{path.name}:{node.lineno}: {ast.unparse(node)}"
        for part in module.body
        for node in ast.walk(part)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and ast.unparse(node.value) not in ("self", "cls", "super()")
        and node.attr not in _defined_names(part if isinstance(part, ast.ClassDef) else module)
    ]


def test_private_fields_of_other_classes_are_not_read() -> None:
    modules = sorted(Path(str(operations.__file__)).parent.rglob("*.py"))
    assert modules
    assert [read for path in modules for read in _private_reads(path)] == []


_CONTRACT = {name for name in vars(Executor) if not name.startswith("_")}


def _uncontracted_uses_of_executors(path: Path) -> list[str]:
    """Return uses of an executor in a module that are not in its contract, for example type checks."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    uses = [
        node
        for node in nodes
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value).endswith("executor")
        and node.attr not in _CONTRACT
        and not ast.unparse(node).startswith("trinitylake_ops.")
    ]
    checks = [
        node
        for node in nodes
        if (isinstance(node, ast.Compare) and "executor" in ast.unparse(node))
        or (
            (isinstance(node, ast.Call) and ast.unparse(node).startswith(("isinstance(", "getattr(", "hasattr(")))
            and "executor" in ast.unparse(node)
        )
    ]
    return [f"{path.name}:{node.lineno}: {ast.unparse(node)}" for node in (*uses, *checks)]


def test_executor_types_are_not_checked() -> None:
    modules = sorted(Path(str(operations.__file__)).parent.rglob("*.py"))
    assert [use for path in modules for use in _uncontracted_uses_of_executors(path)] == []


@pytest.mark.parametrize("executor_class", [LocalExecutor, SparkExecutor])
def test_executors_implement_the_contract(executor_class: type) -> None:
    assert {name for name in vars(executor_class) if not name.startswith("_")} - {"slots"} == _CONTRACT


@pytest.mark.parametrize("weight", Weight, ids=lambda weight: weight.name)
def test_every_weight_is_used(weight: Weight) -> None:
    modules = sorted(Path(str(operations.__file__)).parent.rglob("*.py"))
    assert any(f"ClassVar[Weight] = Weight.{weight.name}\n" in path.read_text() for path in modules)


def test_lakehouses_of_operations_are_created_in_one_module() -> None:
    modules = sorted(Path(str(operations.__file__)).parent.rglob("*.py"))
    assert [path.name for path in modules if 'cache="off"' in path.read_text()] == ["base.py"]


class _RecordingStorage(StorageWrapper):
    def __init__(self, inner: Storage):
        super().__init__(inner)
        self.paths: list[str] = []

    def read(self, path: str, **kwargs: Any) -> bytes:
        self.paths.append(path)
        return self.inner.read(path, **kwargs)


@pytest.mark.parametrize("name", ["DropNamespacePlan", "PrunePlan", "RestorePlan"])
@pytest.mark.parametrize("is_approved", [False, True], ids=["as planned", "approved"])
def test_execution_does_not_read_files_of_the_plan_again(
    aging: Aging, lakes: Lakes, name: str, is_approved: bool
) -> None:
    _PLAN_FUNCTIONS["RestorePlan"](aging.lake, lakes.root("away"))
    with aging.lake.transaction() as txn:
        txn.create_namespace("fresh")
    storage = _RecordingStorage(aging.lake.storage)
    target = lakes.root("away")
    make_plan = (
        (lambda lake, _: operations.plan_restore(lake, "away")) if name == "RestorePlan" else _PLAN_FUNCTIONS[name]
    )
    plan = make_plan(Lakehouse(storage), target)
    read_paths = {path for path in storage.paths if is_immutable_path(path)}
    assert read_paths
    storage.paths.clear()
    plan.execute(plan.digest if is_approved else None)
    assert read_paths.isdisjoint(storage.paths)


def _attempt_with_conflicts(
    n_conflicts: int, error: type[TrinityLakeError] = CommitConflictError
) -> Callable[[int], int]:
    """Return an attempt that conflicts ``n_conflicts`` times, and then returns the number of attempts."""

    def attempt(number: int) -> int:
        if number <= n_conflicts:
            raise error("another commit won the race")
        return number

    return attempt


def test_operation_plans_again_after_conflicts_up_to_a_limit() -> None:
    assert commit_on_latest(_attempt_with_conflicts(0)) == 1
    assert commit_on_latest(_attempt_with_conflicts(MAX_ATTEMPTS - 1)) == MAX_ATTEMPTS
    for attempt, limit in ((_attempt_with_conflicts(MAX_ATTEMPTS), MAX_ATTEMPTS), (_attempt_with_conflicts(1), 1)):
        with pytest.raises(CommitConflictError):
            commit_on_latest(attempt, limit)
    with pytest.raises(CommitConflictError):
        commit_on_latest(_attempt_with_conflicts(1), may_succeed=lambda: False)
    with pytest.raises(TransactionExpiredError):
        commit_on_latest(_attempt_with_conflicts(1, TransactionExpiredError))


def test_only_one_loop_retries_on_the_latest_version() -> None:
    folder = Path(str(operations.__file__)).parent
    loops = [
        path.relative_to(folder).as_posix()
        for path in sorted(folder.rglob("*.py"))
        for loop in ast.walk(ast.parse(path.read_text()))
        if isinstance(loop, ast.For | ast.While)
        and any(
            isinstance(node, ast.ExceptHandler) and "CommitConflictError" in ast.unparse(node.type or node)
            for node in ast.walk(loop)
        )
    ]
    assert loops == ["compaction/tables.py", "definition_commits.py"]  # the first loop stages tables one after another


def test_digest_does_not_apply_to_another_lakehouse(lakes: Lakes) -> None:
    """The two lakehouses have the same version and names but no common commit."""
    first, second = lakes.memory("first"), lakes.memory("second")
    for lake in (first, second):
        with lake.transaction() as txn:
            txn.create_namespace("sales")
    digest = operations.plan_drop_namespace(first, "sales").digest
    with pytest.raises(PlanChangedError):
        operations.plan_drop_namespace(second, "sales").execute(digest)
    assert second.snapshot().namespaces() == ["sales"]
    assert operations.plan_drop_namespace(first, "sales").execute(digest).version == 2
