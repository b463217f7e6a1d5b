"""Responses to the catalog's jar, and handlers for requests about namespaces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from pyiceberg.exceptions import (
    CommitFailedException,
    CommitStateUnknownException,
    NamespaceAlreadyExistsError,
    NamespaceNotEmptyError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
    ValidationError,
)
from pyspark.sql.types import StructType

from trinitylake_ops import errors
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.operations.drop_namespace import plan_drop_namespace
from trinitylake_ops.transaction.lakehouse import Lakehouse

Kind: TypeAlias = Literal["no such namespace", "no such table", "namespace exists", "table exists"]


@dataclass(frozen=True, slots=True)
class CatalogResponse:
    """A JSON value and, for a table, its columns."""

    value: Any = None
    schema: StructType | None = None


class CatalogError(Exception):
    """An outcome that the jar translates to one of Spark's own exceptions, for example a missing table."""

    def __init__(self, kind: Kind, message: str):
        super().__init__(message)
        self.kind = kind


@contextmanager
def in_terms_of_the_catalog() -> Iterator[None]:
    """Translate pyiceberg's exceptions to CatalogError and to errors of this package."""
    try:
        yield
    except NoSuchNamespaceError as error:
        raise CatalogError("no such namespace", str(error)) from error
    except NoSuchTableError as error:
        raise CatalogError("no such table", str(error)) from error
    except NamespaceAlreadyExistsError as error:
        raise CatalogError("namespace exists", str(error)) from error
    except TableAlreadyExistsError as error:
        raise CatalogError("table exists", str(error)) from error
    except NamespaceNotEmptyError as error:
        raise errors.NamespaceNotEmptyError(
            f"{error}; use DROP NAMESPACE ... CASCADE to drop its tables as well"
        ) from error
    except CommitFailedException as error:
        raise errors.CommitConflictError(str(error)) from error
    except CommitStateUnknownException as error:
        # The exception wraps this package's error, which is more useful because it has the commit id.
        if isinstance(error.__cause__, errors.CommitOutcomeUnknownError):
            raise error.__cause__ from None
        raise
    except (ValidationError, ValueError) as error:
        raise errors.InvalidDefinitionError(str(error).partition("\n")[0]) from error


#: A property that Spark sets to the owner of its process. It is ignored, because a lakehouse already records the user
#: of each commit.
OWNER = "owner"
LOCATION = "location"


def list_namespaces(lake: Lakehouse, _request: Mapping[str, Any]) -> CatalogResponse:
    """List all namespaces.

    Args:
        lake: The lakehouse.
        _request: The request, which has no arguments.
    """
    return CatalogResponse(list(lake.snapshot().namespaces()))


def load_namespace(lake: Lakehouse, request: Mapping[str, Any]) -> CatalogResponse:
    """Return the properties of a namespace.

    Args:
        lake: The lakehouse.
        request: The request, decoded from JSON.
    """
    name = one_level(request["namespace"])
    return CatalogResponse(catalog_at(lake).load_namespace_properties((name,)))


def create_namespace(lake: Lakehouse, request: Mapping[str, Any]) -> CatalogResponse:
    """Create a namespace.

    Args:
        lake: The lakehouse.
        request: The request, decoded from JSON.
    """
    if len(request["namespace"]) != 1:
        raise InvalidInputError(f"namespace {'.'.join(request['namespace'])!r} does not have exactly one level")
    properties = {key: value for key, value in request["properties"].items() if key != OWNER}
    check_no_location(properties)
    catalog_at(lake).create_namespace(tuple(request["namespace"]), properties)
    return CatalogResponse()


def alter_namespace(lake: Lakehouse, request: Mapping[str, Any]) -> CatalogResponse:
    """Set and remove properties of a namespace.

    Args:
        lake: The lakehouse.
        request: The request, decoded from JSON.
    """
    name = one_level(request["namespace"])
    check_no_location(request["updates"])
    catalog_at(lake).update_namespace_properties((name,), set(request["removals"]), request["updates"])
    return CatalogResponse()


def drop_namespace(lake: Lakehouse, request: Mapping[str, Any]) -> CatalogResponse:
    """Drop a namespace. With ``cascade``, drop it and all of its tables in one version.

    Args:
        lake: The lakehouse.
        request: The request, decoded from JSON.
    """
    name = one_level(request["namespace"])
    catalog = catalog_at(lake)
    if not request["cascade"]:
        catalog.drop_namespace((name,))
    elif catalog.namespace_exists((name,)):
        plan_drop_namespace(lake, name, cascade=True).execute()
    else:
        raise CatalogError("no such namespace", name)
    return CatalogResponse()


def one_level(namespace: Sequence[str]) -> str:
    """Return a namespace's name. Raises CatalogError for nested namespaces, because they are not supported."""
    if len(namespace) != 1:
        raise CatalogError("no such namespace", ".".join(namespace))
    return str(namespace[0])


def check_no_location(properties: Mapping[str, str]) -> None:
    """Raise InvalidInputError if the properties choose a location."""
    if LOCATION in properties:
        raise InvalidInputError("LOCATION is not supported, because the lakehouse chooses the location; omit it")
