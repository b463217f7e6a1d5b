"""Namespaces of a lakehouse as Spark's SQL knows them: one level, with properties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.maintenance.drop_namespace import plan_drop_namespace
from trinitylake_ops.spark_jobs.catalog.answers import Answer, RefusedError
from trinitylake_ops.tables.catalog import catalog_at
from trinitylake_ops.transaction.lakehouse import Lakehouse

#: Spark adds the owner of its process, which a lakehouse records with each commit already.
OWNER = "owner"
LOCATION = "location"


def list_namespaces(lake: Lakehouse, _request: Mapping[str, Any]) -> Answer:
    """Answer the names."""
    return Answer(list(lake.snapshot().namespaces()))


def load_namespace(lake: Lakehouse, request: Mapping[str, Any]) -> Answer:
    """Answer the properties."""
    name = one_level(request["namespace"])
    return Answer(catalog_at(lake).load_namespace_properties((name,)))


def create_namespace(lake: Lakehouse, request: Mapping[str, Any]) -> Answer:
    """Create a namespace."""
    if len(request["namespace"]) != 1:
        raise InvalidInputError(f"namespaces have one level, unlike {'.'.join(request['namespace'])!r}")
    properties = {key: value for key, value in request["properties"].items() if key != OWNER}
    check_no_location(properties)
    catalog_at(lake).create_namespace(tuple(request["namespace"]), properties)
    return Answer()


def alter_namespace(lake: Lakehouse, request: Mapping[str, Any]) -> Answer:
    """Set and remove properties."""
    name = one_level(request["namespace"])
    check_no_location(request["updates"])
    catalog_at(lake).update_namespace_properties((name,), set(request["removals"]), request["updates"])
    return Answer()


def drop_namespace(lake: Lakehouse, request: Mapping[str, Any]) -> Answer:
    """Drop a namespace, with ``cascade`` all of its tables, in one version."""
    name = one_level(request["namespace"])
    catalog = catalog_at(lake)
    if not request["cascade"]:
        catalog.drop_namespace((name,))
    elif catalog.namespace_exists((name,)):
        plan_drop_namespace(lake, name, cascade=True).execute()
    else:
        raise RefusedError("no such namespace", name)
    return Answer()


def one_level(namespace: Sequence[str]) -> str:
    """Return the name of a namespace. Raises RefusedError for one inside another, as there are none."""
    if len(namespace) != 1:
        raise RefusedError("no such namespace", ".".join(namespace))
    return str(namespace[0])


def check_no_location(properties: Mapping[str, str]) -> None:
    """Raise InvalidInputError for a chosen place."""
    if LOCATION in properties:
        raise InvalidInputError("the lakehouse chooses where files are: leave LOCATION out")
