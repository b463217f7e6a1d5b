"""What Python tells the catalog in Spark: an answer, a refusal that Spark has an exception for, or an error."""

from __future__ import annotations

from collections.abc import Iterator
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

Kind: TypeAlias = Literal["no such namespace", "no such table", "namespace exists", "table exists"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A value of JSON, and the columns of a table."""

    value: Any = None
    schema: StructType | None = None


class RefusedError(Exception):
    """A request that the catalog in Spark turns into an exception of Spark's own, such as for a missing table."""

    def __init__(self, kind: Kind, message: str):
        super().__init__(message)
        self.kind = kind


@contextmanager
def in_terms_of_the_catalog() -> Iterator[None]:
    """Raise pyiceberg's exceptions as refusals, and as errors of this package."""
    try:
        yield
    except NoSuchNamespaceError as error:
        raise RefusedError("no such namespace", str(error)) from error
    except NoSuchTableError as error:
        raise RefusedError("no such table", str(error)) from error
    except NamespaceAlreadyExistsError as error:
        raise RefusedError("namespace exists", str(error)) from error
    except TableAlreadyExistsError as error:
        raise RefusedError("table exists", str(error)) from error
    except NamespaceNotEmptyError as error:
        raise errors.NamespaceNotEmptyError(f"{error}; DROP NAMESPACE ... CASCADE drops its tables, too") from error
    except CommitFailedException as error:
        raise errors.CommitConflictError(str(error)) from error
    except CommitStateUnknownException as error:
        # The catalog raises it for the error that says which commit to ask for.
        if isinstance(error.__cause__, errors.CommitOutcomeUnknownError):
            raise error.__cause__ from None
        raise
    except (ValidationError, ValueError) as error:
        raise errors.InvalidDefinitionError(str(error).partition("\n")[0]) from error
