"""Replace functions of ``time`` in one module only, because other threads of the process also use the real ones."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


def patch_module_time(monkeypatch: pytest.MonkeyPatch, module: ModuleType, **functions: Callable[..., Any]) -> None:
    """Let a module see the module ``time`` with some functions replaced, and nobody else."""
    monkeypatch.setattr(module, "time", SimpleNamespace(**{**vars(module.time), **functions}))
