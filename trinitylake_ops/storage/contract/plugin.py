"""The pytest option ``--storage MODULE:FACTORY`` of the contract.

This module does not import the suite, because pytest must register the suite for assertion rewriting first.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from trinitylake_ops.storage import Storage

#: Returns a storage for an empty folder. Two calls with the same folder return storages with the same files.
Factory = Callable[[Path], Storage]

FACTORY = pytest.StashKey[Factory]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option ``--storage``."""
    group = parser.getgroup("storage contract")
    group.addoption(
        "--storage",
        metavar="MODULE:FACTORY",
        help="the storage to test: a function that takes an empty folder (pathlib.Path) and returns a storage",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Import the factory. Raise UsageError if there is none."""
    name = config.getoption("--storage")
    if name is None:
        raise pytest.UsageError("the option --storage MODULE:FACTORY is required")
    module, _, function = name.partition(":")
    try:
        factory = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise pytest.UsageError(f"--storage {name}: {error}") from error
    if not callable(factory):
        raise pytest.UsageError(f"--storage {name}: not a function")
    config.stash[FACTORY] = factory
