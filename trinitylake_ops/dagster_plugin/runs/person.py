"""Who is behind a run: the user whom Dagster+ signed in, where there is one."""

from __future__ import annotations

import os

import dagster as dg

# Dagster+ sets this variable in all processes of a deployment, and this tag on runs that a person launches.
_DEPLOYMENT = "DAGSTER_CLOUD_DEPLOYMENT_NAME"
_USER_TAG = "user"


def has_signed_in_users() -> bool:
    """Whether this process is part of Dagster+, which knows its users."""
    return bool(os.environ.get(_DEPLOYMENT))


def signed_in_user(run: dg.DagsterRun) -> str | None:
    """Return the user who launched a run. None for a run of a schedule or sensor, and without Dagster+.

    Elsewhere whoever launches a run may give it any tag, so the tag says nothing there.
    """
    return run.tags.get(_USER_TAG) or None if has_signed_in_users() else None
