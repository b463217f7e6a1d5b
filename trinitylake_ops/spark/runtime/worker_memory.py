"""What is imported into a Python worker of Spark stays out of its garbage collections.

Spark keeps its Python workers, and lets each collect garbage after each task, and a helper of the driver after each
question. Such a collection looks at every object of every module, which takes a tenth of a second with ours.
"""

from __future__ import annotations

import gc
import os
import sys

# Spark sets it for the Python processes that it uses more than once, and for no others.
_REUSED = "SPARK_REUSE_WORKER"
_OLDEST_GENERATION = 2

_known = {"modules": 0}


def spare_modules() -> None:
    """Let full collections leave out what the one before has left; does nothing outside of Spark's workers."""
    if _REUSED in os.environ and _freeze not in gc.callbacks:
        gc.callbacks.append(_freeze)


def _freeze(phase: str, info: dict[str, int]) -> None:
    """Freeze what a full collection has left, but only if modules have come since: what is frozen is kept for ever."""
    if phase == "stop" and info["generation"] == _OLDEST_GENERATION and len(sys.modules) > _known["modules"]:
        _known["modules"] = len(sys.modules)
        gc.freeze()
