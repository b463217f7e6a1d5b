"""Values for the Python processes that Spark starts on the driver's machine, outside Spark's plan.

The options of a data source are part of Spark's plan, so Spark's plan: ``explain``, the UI and event logs show them. So
our only option is the path of a private folder. Values that must not be seen there, such as credentials, are in that
folder. The driver's helper process reads them and sends them to the tasks inside pickled objects.
"""

from __future__ import annotations

import pickle
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trinitylake_ops.spark_jobs.runtime.local_cache import place_file

#: The option of a data source that holds the folder.
HANDOVER = "handover"

_GIVEN = "given"
_RETURNED = "returned"
_OWNER_ONLY = 0o600


@contextmanager
def handed_over(value: Any) -> Iterator[str]:
    """Provide the path of a folder, readable for this user only, in which ``value`` waits until the block ends."""
    folder = Path(tempfile.mkdtemp(prefix="trinitylake-handover-"))
    try:
        _put(folder / _GIVEN, value)
        yield str(folder)
    finally:
        shutil.rmtree(folder)


def take_given(folder: str) -> Any:
    """Return the value that was handed over. Called in another process of the same user."""
    return pickle.loads((Path(folder) / _GIVEN).read_bytes())


def put_returned(folder: str, value: Any) -> None:
    """Leave an answer, whole or not at all."""
    _put(Path(folder) / _RETURNED, value)


def take_returned(folder: str) -> Any:
    """Return the answer. Raises FileNotFoundError when there is none."""
    return pickle.loads((Path(folder) / _RETURNED).read_bytes())


def _put(path: Path, value: Any) -> None:
    place_file(path, lambda file: pickle.dump(value, file), mode=_OWNER_ONLY)
