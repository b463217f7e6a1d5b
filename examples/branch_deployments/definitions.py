"""One code location for production and for branches: each branch works on a clone of production.

``LAKE_ROOT`` is the production lakehouse, and the clones are below ``CLONES_ROOT``. A process works for the branch in
``TRINITYLAKE_BRANCH``, or for the branch of a Dagster+ branch deployment. Production lists the open branches of the git
repository ``REPOSITORY``.
"""

import os
import subprocess
from datetime import timedelta

import dagster as dg
import pyarrow as pa

from trinitylake_ops.dagster_plugin import (
    ApplyLimits,
    LakehouseSettings,
    StorageSettings,
    TrinityLakeIOManager,
    TrinityLakeResource,
    build_closed_branch_sensor,
    build_publish_asset,
    build_trinitylake_definitions,
)

lakehouse = TrinityLakeResource.for_branch_deployment(
    root=dg.EnvVar("LAKE_ROOT"),
    clones_root=dg.EnvVar("CLONES_ROOT"),
    retain_for=timedelta(days=14),
    storage_options=StorageSettings.from_environment(),
)


@dg.asset(key=["reports", "revenue"], ins={"orders": dg.AssetIn(["shop", "orders"])})
def revenue(orders: pa.Table) -> pa.Table:
    """Compute the revenue of each customer."""
    return orders.group_by("customer").aggregate([("euros", "sum")])


def open_branches() -> set[str]:
    """Return the branches of the repository. Raise CalledProcessError if it cannot be reached."""
    command = ["git", "ls-remote", "--heads", os.environ["REPOSITORY"]]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    return {line.partition("refs/heads/")[2] for line in output.splitlines()}


publish = build_publish_asset(
    key=["publish", "reports"], tables={"revenue": revenue.key}, description="Publishes the reports as one version."
)
reports = dg.define_asset_job("reports", selection=dg.AssetSelection.assets(revenue, publish))

defs = dg.Definitions.merge(
    dg.Definitions(
        assets=[revenue, publish],
        jobs=[reports],
        # Only production drops the clones of closed branches.
        sensors=[] if lakehouse.is_branch else [build_closed_branch_sensor(open_branches)],
        resources={"io_manager": TrinityLakeIOManager(lakehouse=lakehouse)},
        executor=dg.in_process_executor,
    ),
    build_trinitylake_definitions(
        LakehouseSettings(
            name="",  # jobs are named `clone` and `promote`, without a prefix
            operations="clones",
            lakehouse=lakehouse,
            tables=["shop.orders"],
            published_by=[publish.key],
            limits=ApplyLimits(max_files=10_000, max_bytes=10 * 1024**3, min_age=timedelta(days=7)),
        )
    ),
)
