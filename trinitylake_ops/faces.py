"""Public faces of packages. Each name is imported on first use, so that no program loads what it does not need."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any

from trinitylake_ops.extras import needs


def lazy_face(
    package: str, modules: Mapping[str, Sequence[str]], *, extra: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package that offers names of its modules.

    ``modules`` lists the names of each module, relative to the package. A module that is offered itself has none. With
    ``extra`` the modules need the packages of that extra, and their use raises MissingExtraError without them.
    """
    module_of = {name: module for module, names in modules.items() for name in names}
    offered = sorted([*module_of, *(module for module, names in modules.items() if not names)])

    def find(name: str) -> Any:
        if name not in offered:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with nullcontext() if extra is None else needs(extra):
            module = import_module(f"{package}.{module_of.get(name, name)}")
        found = getattr(module, name) if name in module_of else module
        setattr(sys.modules[package], name, found)
        return found

    return find, lambda: list(offered)
