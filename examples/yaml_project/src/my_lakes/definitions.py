"""Load all definitions in defs."""

from pathlib import Path

import dagster as dg


@dg.definitions
def defs() -> dg.Definitions:
    """Return the definitions of this project."""
    return dg.load_from_defs_folder(path_within_project=Path(__file__).parent)
