"""The operations as jobs, one named job each, for the launchpad and for schedules."""

import dagster as dg

from trinitylake_ops.dagster_plugin.ops import export_minimal, repair_hint, rollback, verify
from trinitylake_ops.dagster_plugin.publish import LAKEHOUSE_KEY

# A destructive or one-off operation is never repeated by the instance's retry settings.
_TAGS = {"dagster/max_retries": "0"}


def maintenance_definitions(*, lakehouse_deps: tuple[dg.AssetKey, ...] = ()) -> dg.Definitions:
    """Return the operations on the resource ``lakehouse``, and the asset that stands for it.

    ``lakehouse_deps`` are the assets that publish into it.
    """
    lakehouse = dg.AssetSpec(
        LAKEHOUSE_KEY,
        deps=lakehouse_deps,
        group_name="publish",
        description="The lakehouse: each materialization is one of its versions.",
        kinds={"trinitylake"},
    )
    return dg.Definitions(assets=[lakehouse], jobs=[_job(op) for op in (rollback, export_minimal, repair_hint, verify)])


def _job(op: dg.OpDefinition) -> dg.JobDefinition:
    graph = dg.GraphDefinition(name=op.name, node_defs=[op], description=op.description)
    return graph.to_job(name=op.name, description=op.description, tags=_TAGS)
