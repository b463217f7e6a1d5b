"""Where the launchpads of jobs are in Dagster's UI, and the tag of a run that says so."""

from __future__ import annotations

from urllib.parse import quote

import dagster as dg

#: The tag of a run that says where its definitions are, as ``REPOSITORY@LOCATION``. Whatever launches runs sets it.
REPOSITORY_TAG = ".dagster/repository"
#: The name of a code location's definitions where nobody named them.
ONLY_REPOSITORY = "__repository__"


def location_of(run: dg.DagsterRun) -> str | None:
    """Return the code location of a run, as paths of the UI name it.

    It is None for a run that was started without one, such as that of a test.
    """
    return run.tags.get(REPOSITORY_TAG)


def launchpad_path(location: str, job: str, config: str) -> str:
    """Return the path, below the UI's address, of the launchpad of a job with a configuration in YAML or JSON."""
    return (
        f"/locations/{quote(location, safe='@')}/jobs/{quote(job)}/playground/setup"
        f"?mode=default&config={quote(config, safe='')}"
    )
