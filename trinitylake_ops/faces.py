"""Public faces of packages. Each name is imported on first use, so that no program loads what it does not need."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_face(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package that offers names of its modules.

    ``modules`` lists the names of each module, relative to the package. A module that is offered itself has none.
    """
    module_of = {name: module for module, names in modules.items() for name in names}
    offered = sorted([*module_of, *(module for module, names in modules.items() if not names)])

    def find(name: str) -> Any:
        if name in module_of:
            found = getattr(import_module(f"{package}.{module_of[name]}"), name)
        elif name in offered:
            found = import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, found)
        return found

    return find, lambda: list(offered)
