"""OpenLineage events in a file, and whether each is what its schema demands.

Its client's classes are generated from the schema: each event is read back into them, and nothing may be left over.
``OPENLINEAGE_SPEC`` names the folder ``spec`` of a clone of OpenLineage: then the JSON Schemas there are asked as well.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import typing
import uuid
from collections.abc import Iterator
from datetime import datetime
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any
from urllib.parse import urlsplit

import attr
import jsonschema
import pytest
from openlineage.client import generated
from openlineage.client.event_v2 import RunEvent
from openlineage.client.generated.base import BaseEvent, BaseFacet
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

#: The variable that names a folder with the schemas.
SPECIFICATION = "OPENLINEAGE_SPEC"
#: Members of all events and of all facets: the classes give them defaults, the schema demands them.
_ALWAYS = {BaseEvent: {"eventTime", "producer", "schemaURL"}, BaseFacet: {"_producer", "_schemaURL"}}
_ONES = {str, int, bool}
_FORMATS = jsonschema.FormatChecker(formats=())


def to_file(patch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Let OpenLineage's own variables send events to a file; returns it."""
    path = folder / "lineage.json"
    patch.setenv("OPENLINEAGE__TRANSPORT__TYPE", "file")
    patch.setenv("OPENLINEAGE__TRANSPORT__LOG_FILE_PATH", str(path))
    patch.setenv("OPENLINEAGE__TRANSPORT__APPEND", "true")
    return path


def events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a file, each of which is as the schema demands."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    for event in found:
        check_event(event)
    return found


def check_event(event: dict[str, Any]) -> None:
    """Assert what OpenLineage's schema demands of a run event and of its facets."""
    read_back(RunEvent, event)
    for facet in _facets(event):
        _check_uri(facet["_producer"])
    _check_uri(event["producer"])
    _check_time(event["eventTime"])
    if folder := os.environ.get(SPECIFICATION):
        check_by_schema(event, Path(folder))


def read_back(kind: Any, value: Any) -> Any:
    """Return a value as an instance of a generated class, or of what such a class holds."""
    kinds = typing.get_args(kind) if isinstance(kind, UnionType) else (kind,)
    (kind,) = (one for one in kinds if one is not NoneType)
    if typing.get_origin(kind) is list:
        assert isinstance(value, list), value
        (of,) = typing.get_args(kind)
        return [read_back(of, one) for one in value]
    if typing.get_origin(kind) is dict:
        _, facet = typing.get_args(kind)
        return {name: read_back(_class_of(one, facet), one) for name, one in value.items()}
    if kind in _ONES:
        assert type(value) is kind, value
        return value
    return kind(value) if issubclass(kind, Enum) else _instance(kind, value)


def _instance(kind: type, value: dict[str, Any]) -> Any:
    types = typing.get_type_hints(kind)
    members = {one.name: one for one in attr.fields(kind)}
    demanded = {name for name, one in members.items() if one.default is attr.NOTHING}
    for base, names in _ALWAYS.items():
        demanded |= names if issubclass(kind, base) else set()
    assert demanded <= value.keys() <= members.keys(), (kind, value)
    read = {name: read_back(types[name], one) for name, one in value.items()}
    made = kind(**{members[name].alias: one for name, one in read.items() if members[name].init})
    for name, one in read.items():  # among them the URL of the schema, which a class sets
        assert getattr(made, name) == one, (kind, name)
    return made


def _class_of(facet: dict[str, Any], base: type) -> type:
    """Return the class of the schema that a facet names. It has to be of its place: a run's, a job's, a table's."""
    found = _classes()[facet["_schemaURL"]]
    assert issubclass(found, base), (found, base)
    return found


@cache
def _classes() -> dict[str, type]:
    for module in pkgutil.iter_modules(generated.__path__):
        importlib.import_module(f"{generated.__name__}.{module.name}")
    return {one._get_schema(): one for one in _below(BaseFacet)}


def _below(kind: type) -> Iterator[Any]:
    for one in kind.__subclasses__():
        yield one
        yield from _below(one)


def _facets(event: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for named in (event["run"], event["job"], *event.get("inputs", ()), *event.get("outputs", ())):
        for kind in ("facets", "inputFacets", "outputFacets"):
            yield from named.get(kind, {}).values()


@_FORMATS.checks("uri", AssertionError)
def _check_uri(value: object) -> bool:
    assert isinstance(value, str) and urlsplit(value).scheme and value.isascii() and " " not in value, value
    return True


@_FORMATS.checks("date-time", (AssertionError, ValueError))
def _check_time(value: object) -> bool:
    assert isinstance(value, str) and "T" in value and datetime.fromisoformat(value).tzinfo is not None, value
    return True


@_FORMATS.checks("uuid", (AssertionError, ValueError))
def _check_uuid(value: object) -> bool:
    assert isinstance(value, str) and str(uuid.UUID(value)) == value, value
    return True


def check_by_schema(event: dict[str, Any], folder: Path) -> None:
    """Ask the schemas in a folder: the one that the event names, and of each facet the one of its name and URL."""
    by_url, by_name = _schemas(folder)

    def check(reference: dict[str, Any], value: Any) -> None:
        jsonschema.Draft202012Validator(reference, registry=by_url, format_checker=_FORMATS).validate(value)

    check({"$ref": event["schemaURL"]}, event)
    for named in (event["run"], event["job"], *event.get("inputs", ()), *event.get("outputs", ())):
        for kind in ("facets", "inputFacets", "outputFacets"):
            for name, facet in named.get(kind, {}).items():
                schema = facet["_schemaURL"].partition("#")[0]
                assert schema in by_name[name], name
                check({"$ref": facet["_schemaURL"]}, facet)
                check({"$ref": schema}, {name: facet})


@cache
def _schemas(folder: Path) -> tuple[Registry[Any], dict[str, set[str]]]:
    """Return all schemas of a folder, and those of the facets of a name."""
    schemas = [json.loads(path.read_text()) for path in (folder / "OpenLineage.json", *folder.glob("facets/*.json"))]
    resources = [(one["$id"], Resource(contents=one, specification=DRAFT202012)) for one in schemas]
    names: dict[str, set[str]] = {}
    for one in schemas:
        for name in one.get("properties", ()):
            names.setdefault(name, set()).add(one["$id"])
    return Registry[Any]().with_resources(resources), names
