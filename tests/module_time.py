"""Replace clocks and sleeps in one module only, because other threads use those of the process."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


def replace_time_functions(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, **functions: Callable[..., Any]
) -> None:
    """Replace functions of the module ``time`` for a single module that imports it."""
    monkeypatch.setattr(module, "time", SimpleNamespace(**{**vars(module.time), **functions}))
