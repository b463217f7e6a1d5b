"""OpenLineage events in a file, and what its specification demands of each, in our own words."""

from __future__ import annotations

import json
import uuid
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

#: Where the specification says what an event, a facet and its members are.
SPECIFICATION = "https://openlineage.io/spec/"
_STATES = ("START", "RUNNING", "COMPLETE", "ABORT", "FAIL", "OTHER")


def to_file(patch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Let OpenLineage's own variables send events to a file; returns it."""
    path = folder / "lineage.json"
    patch.setenv("OPENLINEAGE__TRANSPORT__TYPE", "file")
    patch.setenv("OPENLINEAGE__TRANSPORT__LOG_FILE_PATH", str(path))
    patch.setenv("OPENLINEAGE__TRANSPORT__APPEND", "true")
    return path


def events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a file, each of which is as the specification demands."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    for event in found:
        check_event(event)
    return found


def check_event(event: dict[str, Any]) -> None:
    """Assert what OpenLineage 2-0-2 demands of a run event and its facets."""
    assert event["eventType"] in _STATES
    assert datetime.fromisoformat(event["eventTime"]).tzinfo is not None
    assert event["schemaURL"].startswith(SPECIFICATION) and event["schemaURL"].endswith("#/$defs/RunEvent")
    assert urlsplit(event["producer"]).scheme == "urn"
    assert str(uuid.UUID(event["run"]["runId"])) == event["run"]["runId"]
    _check_facets(event["run"].get("facets", {}))
    for named in (event["job"], *event.get("inputs", ()), *event.get("outputs", ())):
        assert isinstance(named["namespace"], str) and named["namespace"]
        assert isinstance(named["name"], str) and named["name"]
        for kind in ("facets", "inputFacets", "outputFacets"):
            _check_facets(named.get(kind, {}))
    if event["eventType"] == "COMPLETE":
        assert event["job"]["facets"]["jobType"]["processingType"] == "BATCH"


def _check_facets(facets: dict[str, Any]) -> None:
    for facet in facets.values():
        assert urlsplit(facet["_producer"]).scheme in ("urn", "https")
        assert facet["_schemaURL"].startswith(f"{SPECIFICATION}facets/")
