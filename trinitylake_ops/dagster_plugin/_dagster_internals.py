"""All that the plugin takes from Dagster beyond its public modules, in one place.

Each function here says what it is for. A Dagster that has these no more is refused when it is used: what would happen
without them is worse. Assets would turn green when they are staged, or reads would not count when a run publishes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Protocol

import dagster as dg

try:
    from dagster._check import CheckError
    from dagster._core.definitions.assets.definition.asset_spec import AssetExecutionType
    from dagster._core.definitions.assets.graph.asset_graph import AssetGraph
    from dagster._core.definitions.job_base import RepoBackedJob
    from dagster._core.definitions.partitions.context import partition_loading_context
    from dagster._core.definitions.resource_requirement import ResourceRequirement
    from dagster._core.errors import DagsterUserCodeProcessError
    from dagster._core.events import EngineEventData
    from dagster._core.execution.api import execute_run
    from dagster._core.execution.backfill import BulkActionStatus
    from dagster._core.execution.plan.execute_step import _get_output_asset_events, _store_output
    from dagster._core.execution.plan.inputs import FromStepOutput
    from dagster._core.remote_origin import ManagedGrpcPythonEnvCodeLocationOrigin, RemoteRepositoryOrigin
    from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
    from dagster._utils.error import SerializableErrorInfo  # type: ignore[attr-defined]
except ImportError as error:
    raise ImportError(f"this release of Dagster, {dg.__version__}, is not known to this package: {error}") from error

_KEY = "_asset_key"


class InvalidOptionError(dg.DagsterInvalidConfigError, DagsterUserCodeProcessError):
    """A configuration that its schema allows, and its operation rejects: one line, shown without a traceback.

    The webserver checks a configuration by its schema alone, and asks the code location for the rest. Dagster shows the
    traceback of that process for any other error. The value is left out, because it may be a credential.
    """

    def __init__(self, message: str):
        shown = SerializableErrorInfo(message, [], dg.DagsterInvalidConfigError.__name__)
        super().__init__(message, [], None, user_code_process_error_infos=[shown])  # type: ignore[no-untyped-call]


class RunContext(Protocol):
    """The context of an op, an asset or a check."""

    @property
    def run(self) -> dg.DagsterRun:
        """The run."""

    @property
    def repository_def(self) -> dg.RepositoryDefinition:
        """The code location. Raises CheckError where a run was started without one, as in a test."""


def materializations_of(
    context: dg.OutputContext, keys: Sequence[str], metadata: Mapping[str, Any]
) -> list[dg.AssetMaterialization]:
    """Return what Dagster would log for an output: with tags of its code, of its inputs, and of its data.

    Must be called within ``IOManager.handle_output``. A data version and tags of the ``Output`` or
    ``MaterializeResult`` are among the tags.

    Args:
        context: The context of the output.
        keys: The partitions that the run writes, empty for an asset without partitions.
        metadata: The metadata of each materialization.

    Raises:
        DagsterInvalidDefinitionError: This release of Dagster hides the data version and the tags.
    """
    events = _get_output_asset_events(
        context.asset_key,
        keys,
        _stored_output(),
        context.op_def.output_def_named(context.name),
        metadata,
        context.step_context,
        AssetExecutionType.MATERIALIZATION,
    )
    return [event for event in events if isinstance(event, dg.AssetMaterialization)]


def _stored_output() -> dg.Output[Any]:
    """Return the output that Dagster is storing: its context has neither its data version nor its tags."""
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        output = frame.f_locals.get("output") if frame.f_code is _store_output.__code__ else None
        if isinstance(output, dg.Output):
            return output
    raise dg.DagsterInvalidDefinitionError(
        f"this release of Dagster, {dg.__version__}, hides the data version of an output; take another one"
    )


def log_no_materialization(context: dg.OutputContext) -> None:
    """Let Dagster log no materialization of an output: it does so for each that has the key of an asset.

    Raises DagsterInvalidDefinitionError where that can no longer be done.
    """
    if getattr(context, _KEY, None) is not None:
        setattr(context, _KEY, None)
    if context.has_asset_key:
        raise dg.DagsterInvalidDefinitionError(
            f"this release of Dagster, {dg.__version__}, would show staged tables as published; take another one"
        )


def record_in_run(instance: dg.DagsterInstance, run: dg.DagsterRun, message: str, data: Mapping[str, str]) -> None:
    """Record texts with a run, by an event of the engine: no asset is concerned by it."""
    values = {name: dg.MetadataValue.text(text) for name, text in data.items()}
    instance.report_engine_event(message, run, EngineEventData(values))


def checked_partitions(context: dg.InputContext) -> Sequence[str] | None:
    """Return the run's partitions of an asset that is the input of its check.

    Dagster gives a check no partitions, so it would read all of them. None for other inputs, and for a run without
    partitions.
    """
    step = context.step_context
    node, layer = step.node_handle, step.job_def.asset_layer
    checks = (layer.get_asset_check_key_for_node_output(node, output.name) for output in step.step.step_outputs)
    is_own_check = context.asset_key in {check.asset_key for check in checks if check is not None}
    if not (is_own_check and step.has_partitions and step.entity_partitions_def is None):
        return None
    keys = step.partition_key_range
    with partition_loading_context(dynamic_partitions_store=context.instance):
        partitions: Sequence[str] = context.asset_partitions_def.get_partition_keys_in_range(keys)
    return partitions


def has_partitions(context: dg.AssetExecutionContext, asset_key: dg.AssetKey, keys: Set[str]) -> bool:
    """Return whether all keys are partitions of an asset.

    Args:
        context: The context of a step. Its instance has the dynamic partitions.
        asset_key: The asset. It may belong to another step.
        keys: The partition keys, empty for an asset without partitions.
    """
    graph = context.get_step_execution_context().job_def.asset_layer.asset_graph.source_asset_graph
    partitions = graph.get(asset_key).partitions_def if keys and graph.has(asset_key) else None
    with partition_loading_context(dynamic_partitions_store=context.instance):
        return partitions is None or _has_keys(partitions, keys)


def _has_keys(partitions: dg.PartitionsDefinition[str], keys: Set[str]) -> bool:
    if isinstance(partitions, dg.MultiPartitionsDefinition):
        parts = [partitions.get_partition_key_from_str(key).keys_by_dimension for key in keys]
        dimensions = partitions.partitions_defs
        return all(_has_keys(one.partitions_def, {part[one.name] for part in parts}) for one in dimensions)
    if isinstance(partitions, dg.DynamicPartitionsDefinition) and len(keys) > 1:
        return keys <= set(partitions.get_partition_keys())  # one request, however many keys there are
    return all(partitions.has_partition_key(key) for key in keys)


def repository_of(context: RunContext) -> dg.RepositoryDefinition | None:
    """Return the code location of a run, None for one that was started without, as in a test."""
    try:
        return context.repository_def
    except CheckError:
        return None


def asset_context(context: dg.OutputContext) -> dg.AssetExecutionContext:
    """Return the context of the asset whose output is being stored."""
    return dg.AssetExecutionContext(dg.OpExecutionContext(context.step_context))


class StepAssets:
    """The assets of a step and of its run, and all assets of the code location."""

    def __init__(self, context: dg.OutputContext | dg.InputContext):
        self._step = context.step_context
        self._layer = self._step.job_def.asset_layer
        #: All assets of the code location, those that the job leaves out included.
        self.graph: AssetGraph = self._layer.asset_graph.source_asset_graph

    @property
    def own(self) -> Set[dg.AssetKey]:
        """The assets that the step makes. A step of a check alone makes none."""
        keys = self._layer.get_selected_entity_keys_for_node(self._step.node_handle)
        return {key for key in keys if isinstance(key, dg.AssetKey)}

    def reads_itself(self, context: dg.InputContext) -> bool:
        """Whether an input is an asset that the step makes, as it was before, and not the output of another step.

        The steps of a graph make the same assets, and one may read what another one of them has just stored.
        """
        own = {one.name: one.source for one in self._step.step.step_inputs}
        return context.asset_key in self.own and not isinstance(own.get(context.name), FromStepOutput)

    def is_stored_by(self, io_manager: type) -> bool:
        """Whether an IO manager of a class stores an output of the step."""
        return any(self._is_of(output.io_manager_key, io_manager) for output in self._step.op_def.output_defs)

    def stored_with(self, key: dg.AssetKey, io_manager: type) -> list[dg.AssetKey]:
        """Return the other assets of the job that the IO manager of an asset stores.

        Args:
            key: The asset.
            io_manager: The class of the IO manager. There are no assets if that of the asset is of another class.
        """

        def io_manager_key(one: dg.AssetKey) -> str:
            return self.graph.get(one).assets_def.get_io_manager_key_for_asset_key(one)

        if not (self.graph.has(key) and self._is_of(io_manager_key(key), io_manager)):
            return []
        others = (one for one in self._layer.executable_asset_keys if one != key and self.graph.has(one))
        return [one for one in others if io_manager_key(one) == io_manager_key(key)]

    def _is_of(self, io_manager_key: str, io_manager: type) -> bool:
        kind = getattr(self._step.job_def.resource_defs.get(io_manager_key), "configurable_resource_cls", None)
        return isinstance(kind, type) and issubclass(kind, io_manager)

    def in_run(self, keys: Iterable[dg.AssetKey]) -> list[dg.AssetKey]:
        """Return those of some assets that the run makes: a run may leave out assets and steps of its job."""
        return [key for key in keys if key in self._layer.executable_asset_keys and self._is_executed(key)]

    def step_key(self, key: dg.AssetKey) -> str:
        """Return the key of the step that makes an asset of the job."""
        return str(self._layer.get_op_output_handle(key).node_handle)

    def _is_executed(self, key: dg.AssetKey) -> bool:
        handle = self._layer.get_op_output_handle(key).node_handle
        steps = self._step.dagster_run.step_keys_to_execute
        has_node = handle.path[0] in {node.name for node in self._step.job_def.nodes}
        return has_node and (steps is None or str(handle) in steps)


def is_in_backfill(instance: dg.DagsterInstance | None, backfill: str, key: dg.AssetKey, partition: str) -> bool:
    """Whether an asset backfill makes a partition of an asset, or the asset if it has no partitions."""
    record = None if instance is None else instance.get_backfill(backfill)
    data = None if record is None else record.asset_backfill_data
    if data is None:
        return False
    subset = data.target_subset.partitions_subsets_by_asset_key.get(key)
    return key in data.target_subset.non_partitioned_asset_keys if subset is None else partition in subset


def is_backfill_running(instance: dg.DagsterInstance, backfill: str) -> bool:
    """Whether Dagster's daemon may launch more runs of a backfill."""
    record = instance.get_backfill(backfill)
    return record is not None and record.status == BulkActionStatus.REQUESTED


def step_key_of(context: dg.AssetExecutionContext) -> str:
    """Return the key of the step of an asset, the same in all runs."""
    key: str = context.get_step_execution_context().step.key
    return key


def last_of_backfill(
    instance: dg.DagsterInstance, backfill: str, key: dg.AssetKey, partitions: dg.PartitionsDefinition[str] | None
) -> str | None:
    """Return the last partition of an asset that an asset backfill makes, None if it makes none.

    Args:
        instance: The Dagster instance.
        backfill: The id of the backfill.
        key: The asset.
        partitions: The partitions of the asset, which define their order.
    """
    record = instance.get_backfill(backfill)
    data = None if record is None else record.asset_backfill_data
    subset = None if data is None else data.target_subset.partitions_subsets_by_asset_key.get(key)
    if subset is None or partitions is None:
        return None
    keys = set(subset.get_partition_keys())
    ordered = partitions.get_partition_keys(dynamic_partitions_store=instance)
    return next((one for one in reversed(ordered) if one in keys), None)


def reset_input_versions(context: dg.AssetExecutionContext, keys: Iterable[dg.AssetKey]) -> None:
    """Make the asset's next event name the newest events of its inputs, instead of those before the step began."""
    step = context.get_step_execution_context()
    for key in keys:
        step.wipe_input_asset_version_info(key)


class CheckedSelection(dg.AssetSelection):
    """A selection of assets that checks all assets of its code location when it is resolved: when definitions load.

    The process of a run resolves the jobs that it executes only.
    """

    def __init__(self, selection: dg.AssetSelection, check: Callable[[Iterable[dg.AssetsDefinition]], None]):
        """Make a selection.

        Args:
            selection: The assets.
            check: Raises an error if an asset of the code location is wrong.
        """
        self._selection, self._check = selection, check

    def resolve_inner(self, asset_graph: Any, allow_missing: bool) -> Set[dg.AssetKey]:
        """Return the assets of the selection, after the check."""
        if isinstance(asset_graph, AssetGraph):
            self._check(asset_graph.assets_defs)
        return self._selection.resolve_inner(asset_graph, allow_missing=allow_missing)

    def resolve_checks_inner(self, asset_graph: Any, allow_missing: bool) -> Set[dg.AssetCheckKey]:
        """Return the checks of the selection."""
        return self._selection.resolve_checks_inner(asset_graph, allow_missing=allow_missing)

    def to_selection_str(self) -> str:
        """Return the selection as text."""
        return self._selection.to_selection_str()


class TypeOfStored(dg.DagsterType):
    """The type of an input that refuses, when definitions load, what Dagster's own IO managers store.

    ``io_manager_key`` is that of the asset that is the input. ``refused`` is said where it is one of Dagster's own, as
    the default is. They store files of Python. Any other may be, or hold, the right one.
    """

    def __init__(
        self, io_manager_key: str, refused: str, *, key: str, type_check_fn: Callable[..., Any], typing_type: type
    ):
        super().__init__(type_check_fn, key=key, typing_type=typing_type)
        self._requirement = _NotOfDagster(io_manager_key, refused)

    def get_resource_requirements(self) -> Iterator[ResourceRequirement]:
        """Yield what Dagster checks when it makes a job of the input's step."""
        yield from super().get_resource_requirements()
        yield self._requirement


class _NotOfDagster(ResourceRequirement):
    def __init__(self, key: str, refused: str):
        self._key, self._refused = key, refused

    def is_satisfied(self, resource_defs: Mapping[str, dg.ResourceDefinition]) -> bool:
        manager = resource_defs.get(self._key)
        return manager is None or not manager._is_dagster_maintained()  # a missing one is told by Dagster itself

    def ensure_satisfied(self, resource_defs: Mapping[str, dg.ResourceDefinition]) -> None:
        if not self.is_satisfied(resource_defs):
            raise dg.DagsterInvalidDefinitionError(self._refused)


def execute_as_launched(
    definitions: dg.Definitions,
    job: str,
    instance: dg.DagsterInstance,
    *,
    file: str,
    location_name: str,
    run_config: Mapping[str, Any] | None = None,
    tags: Mapping[str, str] | None = None,
) -> dg.JobExecutionResult:
    """Run a job within this process as if the UI had launched it, from the code location that loads ``file``.

    So the UI shows the run on its home page and at its job. The run knows all definitions: which assets hold tables,
    and where links may lead. The definitions need an executor that stays in the process.
    """
    repository = definitions.get_repository_def()
    location = ManagedGrpcPythonEnvCodeLocationOrigin(
        loadable_target_origin=LoadableTargetOrigin(python_file=file, working_directory=os.getcwd()),
        location_name=location_name,
    )
    backed = RepoBackedJob(job, repository)
    run = instance.create_run_for_job(
        backed.get_definition(),
        run_config=run_config,
        tags=tags,
        remote_job_origin=RemoteRepositoryOrigin(location, repository.name).get_job_origin(job),
    )
    return execute_run(backed, run, instance)
