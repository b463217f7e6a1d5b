"""Pages of the Python API: the public names of each public module, with their docstrings."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from inspect import isclass

#: Public modules by page. All other modules are private.
PUBLIC_MODULES: Mapping[str, str] = {
    "engine": "trinitylake_ops",
    "operations": "trinitylake_ops.operations",
    "iceberg": "trinitylake_ops.iceberg",
    "spark": "trinitylake_ops.spark",
    "storage": "trinitylake_ops.storage",
    "dagster": "trinitylake_ops.dagster_plugin",
}


def pages() -> dict[str, str]:
    """Return the pages by their paths on the site."""
    return {f"api/{page}.md": _page(name) for page, name in PUBLIC_MODULES.items()}


def _page(module_name: str) -> str:
    module = import_module(module_name)
    documented = [name for name in module.__all__ if hasattr(getattr(module, name), "__module__")]
    constants = sorted(set(module.__all__) - set(documented))
    functions = [name for name in documented if not isclass(getattr(module, name))]
    text = f"# {module_name}\n\n{module.__doc__}\n\n"
    if constants:
        text += f"Also public: {', '.join(f'`{name}`' for name in constants)}.\n\n"
    for name in sorted(functions) + sorted(set(documented) - set(functions)):
        text += f"::: {module_name}.{name}\n\n"
    return text
