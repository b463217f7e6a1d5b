"""The option ``--storage MODULE:FACTORY`` of pytest: which storage the contract is run on."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from trinitylake_ops.storage import Storage

#: Makes a storage for a folder of its own. Twice the same folder is twice the same files.
Factory = Callable[[Path], Storage]

FACTORY = pytest.StashKey[Factory]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    group = parser.getgroup("storage contract")
    group.addoption(
        "--storage",
        metavar="MODULE:FACTORY",
        help="the storage to test: a function that takes a folder of its own (pathlib.Path) and returns a storage",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Find the factory. Raises UsageError, one line, where there is none of that name."""
    given = config.getoption("--storage")
    if given is None:
        raise pytest.UsageError("say which storage: --storage MODULE:FACTORY")
    module, _, name = given.partition(":")
    try:
        factory = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise pytest.UsageError(f"--storage {given}: {error}") from error
    if not callable(factory):
        raise pytest.UsageError(f"--storage {given}: this is no function")
    config.stash[FACTORY] = factory
