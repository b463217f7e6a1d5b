"""Where the launchpads of jobs are in Dagster's UI, and the tag of a run that says so."""

from __future__ import annotations

from urllib.parse import quote

import dagster as dg

#: The tag of a run that says where its definitions are, as ``REPOSITORY@LOCATION``. Whatever launches runs sets it.
REPOSITORY_TAG = ".dagster/repository"


def place_of(run: dg.DagsterRun) -> str | None:
    """Return where the definitions of a run are, as ``REPOSITORY@LOCATION``, which is how paths of the UI name it.

    It is None for a run that was started without a code location, such as that of a test. The database of Dagster adds
    the tag when a run is stored: the run itself only knows its origin.
    """
    origin = run.remote_job_origin
    return run.tags.get(REPOSITORY_TAG) if origin is None else origin.repository_origin.get_label()


def launchpad_path(place: str, job: str, config: str) -> str:
    """Return the path, below the UI's address, of the launchpad of a job with a configuration in YAML or JSON."""
    return (
        f"/locations/{quote(place, safe='@')}/jobs/{quote(job)}/playground/setup"
        f"?mode=default&config={quote(config, safe='')}"
    )
