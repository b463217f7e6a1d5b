"""Read OpenLineage events from a file and validate them.

The classes of the OpenLineage client are generated from the schema, so each event must be convertible to these classes
without unknown members. If ``OPENLINEAGE_SPEC`` is set to the folder ``spec`` of a clone of OpenLineage, events are
also validated against its JSON Schemas.
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

#: Environment variable with the folder of the schemas.
SPEC_VARIABLE = "OPENLINEAGE_SPEC"
#: Members of all events and facets that the schema requires, although the classes have defaults for them.
_REQUIRED_MEMBERS = {BaseEvent: {"eventTime", "producer", "schemaURL"}, BaseFacet: {"_producer", "_schemaURL"}}
_SCALARS = {str, int, bool}
_FORMATS = jsonschema.FormatChecker(formats=())


def log_to_file(patch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Configure OpenLineage with environment variables to write events to a file, and return the path of the file."""
    path = folder / "lineage.json"
    patch.setenv("OPENLINEAGE__TRANSPORT__TYPE", "file")
    patch.setenv("OPENLINEAGE__TRANSPORT__LOG_FILE_PATH", str(path))
    patch.setenv("OPENLINEAGE__TRANSPORT__APPEND", "true")
    return path


def events(path: Path) -> list[dict[str, Any]]:
    """Validate and return the events in a file."""
    run_events = [json.loads(line) for line in path.read_text().splitlines()]
    for event in run_events:
        check_event(event)
    return run_events


def check_event(event: dict[str, Any]) -> None:
    """Assert that a run event and its facets conform to OpenLineage's schema."""
    convert(RunEvent, event)
    for facet in _facets(event):
        _check_uri(facet["_producer"])
    _check_uri(event["producer"])
    _check_time(event["eventTime"])
    if folder := os.environ.get(SPEC_VARIABLE):
        check_by_schema(event, Path(folder))


def convert(kind: Any, value: Any) -> Any:
    """Convert a value to an instance of a generated class, recursively."""
    kinds = typing.get_args(kind) if isinstance(kind, UnionType) else (kind,)
    (kind,) = (member for member in kinds if member is not NoneType)
    if typing.get_origin(kind) is list:
        assert isinstance(value, list), value
        (item_kind,) = typing.get_args(kind)
        return [convert(item_kind, item) for item in value]
    if typing.get_origin(kind) is dict:
        _, facet = typing.get_args(kind)
        return {name: convert(_class_of(item, facet), item) for name, item in value.items()}
    if kind in _SCALARS:
        assert type(value) is kind, value
        return value
    return kind(value) if issubclass(kind, Enum) else _instance(kind, value)


def _instance(kind: type, value: dict[str, Any]) -> Any:
    types = typing.get_type_hints(kind)
    members = {field.name: field for field in attr.fields(kind)}
    required = {name for name, field in members.items() if field.default is attr.NOTHING}
    for base, names in _REQUIRED_MEMBERS.items():
        required |= names if issubclass(kind, base) else set()
    assert required <= value.keys() <= members.keys(), (kind, value)
    converted = {name: convert(types[name], item) for name, item in value.items()}
    instance = kind(**{members[name].alias: item for name, item in converted.items() if members[name].init})
    for name, item in converted.items():  # includes the URL of the schema, which the class sets
        assert getattr(instance, name) == item, (kind, name)
    return instance


def _class_of(facet: dict[str, Any], base: type) -> type:
    """Return the class for the schema of a facet, which must be a subclass of ``base``, for example of job facets."""
    facet_class = _classes()[facet["_schemaURL"]]
    assert issubclass(facet_class, base), (facet_class, base)
    return facet_class


@cache
def _classes() -> dict[str, type]:
    for module in pkgutil.iter_modules(generated.__path__):
        importlib.import_module(f"{generated.__name__}.{module.name}")
    return {facet_class._get_schema(): facet_class for facet_class in _subclasses(BaseFacet)}


def _subclasses(kind: type) -> Iterator[Any]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _facets(event: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for dataset in (event["run"], event["job"], *event.get("inputs", ()), *event.get("outputs", ())):
        for kind in ("facets", "inputFacets", "outputFacets"):
            yield from dataset.get(kind, {}).values()


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
    """Validate an event against its schema in a folder, and each facet against the schema of its name and URL."""
    by_url, by_name = _schemas(folder)

    def check(reference: dict[str, Any], value: Any) -> None:
        jsonschema.Draft202012Validator(reference, registry=by_url, format_checker=_FORMATS).validate(value)

    check({"$ref": event["schemaURL"]}, event)
    for dataset in (event["run"], event["job"], *event.get("inputs", ()), *event.get("outputs", ())):
        for kind in ("facets", "inputFacets", "outputFacets"):
            for name, facet in dataset.get(kind, {}).items():
                schema = facet["_schemaURL"].partition("#")[0]
                assert schema in by_name[name], name
                check({"$ref": facet["_schemaURL"]}, facet)
                check({"$ref": schema}, {name: facet})


@cache
def _schemas(folder: Path) -> tuple[Registry[Any], dict[str, set[str]]]:
    """Return all schemas of a folder, and the ids of the schemas that define each facet name."""
    schemas = [json.loads(path.read_text()) for path in (folder / "OpenLineage.json", *folder.glob("facets/*.json"))]
    resources = [(schema["$id"], Resource(contents=schema, specification=DRAFT202012)) for schema in schemas]
    names: dict[str, set[str]] = {}
    for schema in schemas:
        for name in schema.get("properties", ()):
            names.setdefault(name, set()).add(schema["$id"])
    return Registry[Any]().with_resources(resources), names
