"""Metadata of this package for Airflow's registry of providers."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

_HOOK = "trinitylake_ops.airflow_plugin.hook.TrinityLakeHook"


def provider_info() -> dict[str, Any]:
    """Return the description of the provider, which registers the connection type ``trinitylake``."""
    return {
        "package-name": "trinitylake-ops",
        "name": "TrinityLake",
        "description": "Pipelines and operations of TrinityLake lakehouses.",
        "versions": [version("trinitylake-ops")],
        "connection-types": [{"connection-type": "trinitylake", "hook-class-name": _HOOK}],
    }
