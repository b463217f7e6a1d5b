"""All uses of Dagster's private modules.

An incompatible release of Dagster is rejected with an error, because running without these functions would give wrong
results: staged assets would be shown as materialized, or a run's reads would not be validated when the run publishes.
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
    raise ImportError(f"Dagster {dg.__version__} is not supported: {error}; install a supported release") from error

_KEY = "_asset_key"


class InvalidOptionError(dg.DagsterInvalidConfigError, DagsterUserCodeProcessError):
    """Raised for a run configuration that matches its schema but is rejected by the operation. Shown as one line.

    The webserver validates only the schema, and the code location validates the values. For any other error, Dagster
    displays the traceback of that process. The message does not contain the value, because it may be a credential.
    """

    def __init__(self, message: str):
        error_info = SerializableErrorInfo(message, [], dg.DagsterInvalidConfigError.__name__)
        super().__init__(message, [], None, user_code_process_error_infos=[error_info])  # type: ignore[no-untyped-call]


class RunContext(Protocol):
    """The context of an op, an asset or a check."""

    @property
    def run(self) -> dg.DagsterRun:
        """The run."""

    @property
    def repository_def(self) -> dg.RepositoryDefinition:
        """The code location. Raises CheckError if the run was started without one, as in a test."""


def materializations_of(
    context: dg.OutputContext, keys: Sequence[str], metadata: Mapping[str, Any]
) -> list[dg.AssetMaterialization]:
    """Return the materializations that Dagster would log for an output.

    They have the tags for the code version, the input versions and the data version, including tags of the ``Output``
    or ``MaterializeResult``. Must be called within ``IOManager.handle_output``.

    Args:
        context: The output context.
        keys: The partitions that the run writes, empty for an asset without partitions.
        metadata: The metadata of each materialization.

    Raises:
        DagsterInvalidDefinitionError: The data version and the tags are not accessible in this release of Dagster.
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
    """Return the output that Dagster is storing, because its context lacks the data version and the tags."""
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        output = frame.f_locals.get("output") if frame.f_code is _store_output.__code__ else None
        if isinstance(output, dg.Output):
            return output
    raise dg.DagsterInvalidDefinitionError(
        f"Dagster {dg.__version__} is not supported: the data version of an output is not accessible; install another"
        " release"
    )


def log_no_materialization(context: dg.OutputContext) -> None:
    """Prevent Dagster from logging a materialization of an output, by removing the asset key from its context.

    Raises:
        DagsterInvalidDefinitionError: This release of Dagster would log the materialization anyway.
    """
    if getattr(context, _KEY, None) is not None:
        setattr(context, _KEY, None)
    if context.has_asset_key:
        raise dg.DagsterInvalidDefinitionError(
            f"Dagster {dg.__version__} is not supported: it would show staged tables as published; install another"
            " release"
        )


def record_in_run(instance: dg.DagsterInstance, run: dg.DagsterRun, message: str, data: Mapping[str, str]) -> None:
    """Record data in the event log of a run as an engine event, which does not affect any asset.

    Args:
        instance: The Dagster instance.
        run: The run.
        message: The event message.
        data: The values by metadata key.
    """
    values = {name: dg.MetadataValue.text(text) for name, text in data.items()}
    instance.report_engine_event(message, run, EngineEventData(values))


def checked_partitions(context: dg.InputContext) -> Sequence[str] | None:
    """Return the run's partitions for an input that is the asset checked by the step.

    Dagster provides no partitions to a check, which would therefore read all of them. Returns None for other inputs,
    and in a run without partitions.
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
    """Whether all keys are existing partitions of an asset.

    Args:
        context: The context of a step. Its instance provides the dynamic partitions.
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
        return all(
            _has_keys(dimension.partitions_def, {part[dimension.name] for part in parts}) for dimension in dimensions
        )
    if isinstance(partitions, dg.DynamicPartitionsDefinition) and len(keys) > 1:
        return keys <= set(partitions.get_partition_keys())  # one query for all keys
    return all(partitions.has_partition_key(key) for key in keys)


def repository_of(context: RunContext) -> dg.RepositoryDefinition | None:
    """Return the code location of a run, or None if it was started without one, as in a test."""
    try:
        return context.repository_def
    except CheckError:
        return None


def asset_context(context: dg.OutputContext) -> dg.AssetExecutionContext:
    """Return the context of the asset whose output is being stored."""
    return dg.AssetExecutionContext(dg.OpExecutionContext(context.step_context))


class StepAssets:
    """The assets of a step, of its run and of the code location."""

    def __init__(self, context: dg.OutputContext | dg.InputContext):
        self._step = context.step_context
        self._layer = self._step.job_def.asset_layer
        #: All assets of the code location, including those that are not part of the job.
        self.graph: AssetGraph = self._layer.asset_graph.source_asset_graph

    @property
    def own(self) -> Set[dg.AssetKey]:
        """The assets that the step materializes. A step that only runs a check materializes no assets."""
        keys = self._layer.get_selected_entity_keys_for_node(self._step.node_handle)
        return {key for key in keys if isinstance(key, dg.AssetKey)}

    def reads_itself(self, context: dg.InputContext) -> bool:
        """Whether an input is the previous state of an asset that the step itself materializes.

        The steps of a graph asset materialize the same assets. An input that is the output of another step of the graph
        is not a previous state.
        """
        sources = {step_input.name: step_input.source for step_input in self._step.step.step_inputs}
        return context.asset_key in self.own and not isinstance(sources.get(context.name), FromStepOutput)

    def is_stored_by(self, io_manager: type) -> bool:
        """Whether an IO manager of the class stores an output of the step."""
        return any(self._is_of(output.io_manager_key, io_manager) for output in self._step.op_def.output_defs)

    def stored_with(self, key: dg.AssetKey, io_manager: type) -> list[dg.AssetKey]:
        """Return the other assets of the job with the same IO manager as an asset.

        Args:
            key: The asset.
            io_manager: The required class of the IO manager. The result is empty if the asset's IO manager has another
                class.
        """

        def io_manager_key(asset_key: dg.AssetKey) -> str:
            return self.graph.get(asset_key).assets_def.get_io_manager_key_for_asset_key(asset_key)

        if not (self.graph.has(key) and self._is_of(io_manager_key(key), io_manager)):
            return []
        others = (other for other in self._layer.executable_asset_keys if other != key and self.graph.has(other))
        return [other for other in others if io_manager_key(other) == io_manager_key(key)]

    def _is_of(self, io_manager_key: str, io_manager: type) -> bool:
        kind = getattr(self._step.job_def.resource_defs.get(io_manager_key), "configurable_resource_cls", None)
        return isinstance(kind, type) and issubclass(kind, io_manager)

    def in_run(self, keys: Iterable[dg.AssetKey]) -> list[dg.AssetKey]:
        """Return the assets that the run materializes, which may be a subset of the job's assets."""
        return [key for key in keys if key in self._layer.executable_asset_keys and self._is_executed(key)]

    def step_key(self, key: dg.AssetKey) -> str:
        """Return the key of the step that materializes an asset of the job."""
        return str(self._layer.get_op_output_handle(key).node_handle)

    def _is_executed(self, key: dg.AssetKey) -> bool:
        handle = self._layer.get_op_output_handle(key).node_handle
        steps = self._step.dagster_run.step_keys_to_execute
        has_node = handle.path[0] in {node.name for node in self._step.job_def.nodes}
        return has_node and (steps is None or str(handle) in steps)


def is_in_backfill(instance: dg.DagsterInstance | None, backfill: str, key: dg.AssetKey, partition: str) -> bool:
    """Whether an asset backfill materializes a partition of an asset, or the asset if it has no partitions."""
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
    """Return the key of an asset's step, which is the same in all runs."""
    key: str = context.get_step_execution_context().step.key
    return key


def last_of_backfill(
    instance: dg.DagsterInstance, backfill: str, key: dg.AssetKey, partitions: dg.PartitionsDefinition[str] | None
) -> str | None:
    """Return the last partition of an asset that an asset backfill materializes, or None if there is none.

    Args:
        instance: The Dagster instance.
        backfill: The backfill id.
        key: The asset.
        partitions: The partitions of the asset, which determine the order.
    """
    record = instance.get_backfill(backfill)
    data = None if record is None else record.asset_backfill_data
    subset = None if data is None else data.target_subset.partitions_subsets_by_asset_key.get(key)
    if subset is None or partitions is None:
        return None
    keys = set(subset.get_partition_keys())
    ordered = partitions.get_partition_keys(dynamic_partitions_store=instance)
    return next((partition for partition in reversed(ordered) if partition in keys), None)


def reset_input_versions(context: dg.AssetExecutionContext, keys: Iterable[dg.AssetKey]) -> None:
    """Make the asset's next event refer to its inputs' newest events, not to their events before the step started."""
    step = context.get_step_execution_context()
    for key in keys:
        step.wipe_input_asset_version_info(key)


class CheckedSelection(dg.AssetSelection):
    """An asset selection that validates all assets of its code location when it is resolved.

    The selection is resolved when the code location loads its definitions. A run process resolves only the job that it
    executes.
    """

    def __init__(self, selection: dg.AssetSelection, check: Callable[[Iterable[dg.AssetsDefinition]], None]):
        """Create a selection.

        Args:
            selection: The selected assets.
            check: Raises an error if an asset of the code location is invalid.
        """
        self._selection, self._check = selection, check

    def resolve_inner(self, asset_graph: Any, allow_missing: bool) -> Set[dg.AssetKey]:
        """Return the assets of the selection, after running the check."""
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
    """An input type that rejects Dagster's own IO managers, which store pickle files, when definitions load.

    Any other IO manager is accepted, because it may be, or wrap, a TrinityLakeIOManager.
    """

    def __init__(
        self, io_manager_key: str, message: str, *, key: str, type_check_fn: Callable[..., Any], typing_type: type
    ):
        """Create a type.

        Args:
            io_manager_key: The key of the IO manager that stores the input's asset.
            message: The error message if that IO manager is one of Dagster's own.
            key: The unique key of the type.
            type_check_fn: Checks a value.
            typing_type: The Python type.
        """
        super().__init__(type_check_fn, key=key, typing_type=typing_type)
        self._requirement = _SatisfiedRequirement(io_manager_key, message)

    def get_resource_requirements(self) -> Iterator[ResourceRequirement]:
        """Yield the requirements that Dagster checks when it builds a job with the input's step."""
        yield from super().get_resource_requirements()
        yield self._requirement


class _SatisfiedRequirement(ResourceRequirement):
    def __init__(self, key: str, message: str):
        self._key, self._message = key, message

    def is_satisfied(self, resource_defs: Mapping[str, dg.ResourceDefinition]) -> bool:
        manager = resource_defs.get(self._key)
        return manager is None or not manager._is_dagster_maintained()  # Dagster itself reports a missing resource

    def ensure_satisfied(self, resource_defs: Mapping[str, dg.ResourceDefinition]) -> None:
        if not self.is_satisfied(resource_defs):
            raise dg.DagsterInvalidDefinitionError(self._message)


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
    """Run a job in this process as if the UI had launched it.

    The UI then lists the run on the home page and on the job's page. The run has access to all definitions of the code
    location.

    Args:
        definitions: The definitions, which must use an in-process executor.
        job: The job name.
        instance: The Dagster instance.
        file: The Python file from which the code location loads the definitions.
        location_name: The name of the code location.
        run_config: The run configuration.
        tags: The run tags.
    """
    repository = definitions.get_repository_def()
    location = ManagedGrpcPythonEnvCodeLocationOrigin(
        loadable_target_origin=LoadableTargetOrigin(python_file=file, working_directory=os.getcwd()),
        location_name=location_name,
    )
    repository_job = RepoBackedJob(job, repository)
    run = instance.create_run_for_job(
        repository_job.get_definition(),
        run_config=run_config,
        tags=tags,
        remote_job_origin=RemoteRepositoryOrigin(location, repository.name).get_job_origin(job),
    )
    return execute_run(repository_job, run, instance)
