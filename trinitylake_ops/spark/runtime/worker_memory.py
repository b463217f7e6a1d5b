"""Exclude imported modules from garbage collection in Spark's Python workers.

Spark reuses its Python workers, and runs a full collection after each task, and in helpers of the driver after each
request. A collection that traverses all objects of all imported modules takes a tenth of a second.
"""

from __future__ import annotations

import gc
import os
import sys

# Spark sets it only for Python processes that it reuses.
_REUSED = "SPARK_REUSE_WORKER"
_OLDEST_GENERATION = 2

_frozen = {"modules": 0}


def freeze_modules() -> None:
    """Exclude objects that survive a full collection from later collections. Does nothing outside Spark's workers."""
    if _REUSED in os.environ and _freeze not in gc.callbacks:
        gc.callbacks.append(_freeze)


def _freeze(phase: str, info: dict[str, int]) -> None:
    """Freeze survivors of a full collection if modules were imported since the last time. Frozen objects are leaked."""
    if phase == "stop" and info["generation"] == _OLDEST_GENERATION and len(sys.modules) > _frozen["modules"]:
        _frozen["modules"] = len(sys.modules)
        gc.freeze()
