"""Pages of the Python interface: for each face of the package, the names that it offers, from their docstrings."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from inspect import isclass

#: The faces of the package by their pages. All other paths are private.
FACES: Mapping[str, str] = {
    "engine": "trinitylake_ops",
    "operations": "trinitylake_ops.operations",
    "iceberg": "trinitylake_ops.iceberg",
    "spark": "trinitylake_ops.spark",
    "storage": "trinitylake_ops.storage",
    "dagster": "trinitylake_ops.dagster_plugin",
}


def pages() -> dict[str, str]:
    """Return the pages by their places on the site."""
    return {f"api/{page}.md": _page(face) for page, face in FACES.items()}


def _page(face: str) -> str:
    module = import_module(face)
    offered = [name for name in module.__all__ if hasattr(getattr(module, name), "__module__")]
    others = sorted(set(module.__all__) - set(offered))
    functions = [name for name in offered if not isclass(getattr(module, name))]
    text = f"# {face}\n\n{module.__doc__}\n\n"
    if others:
        text += f"It also offers {', '.join(f'`{name}`' for name in others)}.\n\n"
    for name in sorted(functions) + sorted(set(offered) - set(functions)):
        text += f"::: {face}.{name}\n\n"
    return text
