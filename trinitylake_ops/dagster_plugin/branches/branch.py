"""The branch that a process works for, by its environment, and the clone that belongs to it.

Dagster+ sets variables in each branch deployment. Elsewhere one variable of ours says the same.
"""

from __future__ import annotations

import hashlib
import os
import re

from trinitylake_ops import Lakehouse, maintenance
from trinitylake_ops.errors import ExportExistsError, InvalidInputError, LakehouseExistsError, LakehouseNotFoundError
from trinitylake_ops.operations.names import BRANCH_PREFIX
from trinitylake_ops.storage.options import StorageOptions

#: The name of the branch. It comes before what Dagster+ says.
BRANCH_VARIABLE = "TRINITYLAKE_BRANCH"

_IS_BRANCH_DEPLOYMENT = "DAGSTER_CLOUD_IS_BRANCH_DEPLOYMENT"
_GIT_BRANCH = "DAGSTER_CLOUD_GIT_BRANCH"
_DEPLOYMENT = "DAGSTER_CLOUD_DEPLOYMENT_NAME"
_LONGEST_BRANCH_CHARS = 1000
_SHOWN_CHARS = 60


def current_branch() -> str | None:
    """Return the branch of this process, None in production.

    Raises InvalidInputError for a branch deployment that does not say which it is, and for a name that is too long.
    """
    branch = os.environ.get(BRANCH_VARIABLE, "").strip()
    if not branch and os.environ.get(_IS_BRANCH_DEPLOYMENT, "").strip() == "1":
        branch = os.environ.get(_GIT_BRANCH, "").strip() or os.environ.get(_DEPLOYMENT, "").strip()
        if not branch:
            raise InvalidInputError(
                f"{_IS_BRANCH_DEPLOYMENT} is set, but neither {_GIT_BRANCH} nor {_DEPLOYMENT}: set {BRANCH_VARIABLE}"
                " to the name of the branch"
            )
    if len(branch) > _LONGEST_BRANCH_CHARS:
        raise InvalidInputError(f"the name of the branch has {len(branch)} characters, more than 1,000")
    return branch or None


def branch_clone(branch: str) -> str:
    """Return the name of the clone of a branch: what can be read of it, and a checksum that keeps branches apart."""
    shown = re.sub(r"[^a-z0-9]+", "-", branch.lower())[:_SHOWN_CHARS].strip("-")
    checksum = hashlib.sha256(branch.encode()).hexdigest()[:12]
    return f"{BRANCH_PREFIX}{shown}-{checksum}" if shown else f"{BRANCH_PREFIX}{checksum}"


def open_branch(root: str, parent_root: str, name: str, retain_ms: int, options: StorageOptions) -> Lakehouse:
    """Return the clone of a branch, which the first run makes.

    Raises LakehouseNotFoundError without a parent, ExportExistsError where the parent records the clone and its root
    vanished, InvalidInputError where another lakehouse stands there. Raises StorageError.
    """
    try:
        return _checked(Lakehouse.open(root, options), name)
    except LakehouseNotFoundError:
        pass
    parent = Lakehouse.open(parent_root, options)
    try:
        maintenance.plan_clone(parent, root, name, retain_for=retain_ms).execute()
    except (ExportExistsError, LakehouseExistsError) as error:  # another run made it first, or it vanished
        try:
            return _checked(Lakehouse.open(root, options), name)
        except LakehouseNotFoundError:
            raise error from None
    return _checked(Lakehouse.open(root, options), name)


def _checked(lake: Lakehouse, name: str) -> Lakehouse:
    parent = lake.snapshot().definition.parent
    if parent is None or parent.name != name:
        raise InvalidInputError(
            f"the lakehouse at {lake.root} is not the clone {name!r} of the branch; give branches a root of their own"
        )
    return lake
