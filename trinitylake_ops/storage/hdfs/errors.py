"""The error table of HDFS (S7), and typed errors for exceptions of hdfs-native.

The library raises FileNotFoundError, FileExistsError and OSError with only a text. All other errors are RuntimeErrors
with the class and the message of the server's exception, or with the kind of the library's own error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from trinitylake_ops.errors import (
    AmbiguousWriteError,
    FileExistsAlreadyError,
    FileMissingError,
    InvalidLocationError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
    ThrottledError,
    TransientError,
    TrinityLakeError,
    UnreachableError,
)
from trinitylake_ops.storage.error_table import EXISTS, FULL, MISSING, RETRY, SLOWER, ErrorRow, find_row
from trinitylake_ops.storage.http.requests import ambiguous_error


class OverdueError(Exception):
    """A call timed out, or was not started because too many calls hang."""

    def __init__(self, reason: str, *, begun: bool):
        super().__init__(reason)
        self.begun = begun


class ForkedError(Exception):
    """This process was forked after its parent used the library. A child must not use its threads and sockets."""


#: All exceptions that a call may raise.
FAILURES = (OSError, RuntimeError, ForkedError, OverdueError)


class Step(Enum):
    """One or more requests that take effect together. The value is the verb that messages use."""

    READ = "read"
    STAT = "look up"
    STAGE = "write a temporary file for"  # no reader sees it
    FOLDER = "create the folder of"
    CREATE = "create"
    WRITE = "write"
    DELETE = "delete"
    LIST = "list"
    CLOCK = "get the time of"

    @property
    def changes_files(self) -> bool:
        """Whether the step may have an effect for readers even if its response is lost."""
        return self in (Step.CREATE, Step.WRITE, Step.DELETE)

    @property
    def is_rename(self) -> bool:
        """Whether the step renames a temporary file."""
        return self in (Step.CREATE, Step.WRITE)


@dataclass(frozen=True, slots=True)
class Request:
    """A step, described for error messages."""

    step: Step
    #: Path relative to the root. For LIST, the prefix.
    path: str
    root: str

    @property
    def failure(self) -> str:
        """The first part of every message: which operation failed, and where."""
        if self.step is Step.CLOCK:
            return f"cannot {self.step.value} {self.root}"
        return f"cannot {self.step.value} {self.path!r} under {self.root}"


#: Classes that the library raises for file errors. All other OSErrors are transport failures.
_OWN_CLASSES = (FileNotFoundError, FileExistsError, IsADirectoryError)
_CLASS = re.compile(r'^(?:Fatal)?RPCError\("([A-Za-z0-9_.$]+)", "(.*)"\)$', re.DOTALL)
_OWN_KIND = re.compile(r"^([A-Za-z]+)\(")
_NOT_CONNECTED = re.compile(r"Connection refused|failed to lookup address|No route to host|Network is unreachable")
_IS_FOLDER = re.compile("must both be directories")
_NO_REPLICA = re.compile(r"could only be replicated to \d+ nodes")
_NO_SPACE = re.compile(
    r"(?s)^(?!.*(?:There are 0 datanode\(s\) running|[1-9]\d* node\(s\) are excluded))"
    r".*could only be replicated to \d+ nodes"
)
_NO_SOURCE = "rename source "
_NO_PARENT = "rename destination parent "
_TEMPORARY_EXCEPTIONS = {
    "SafeModeException",
    "StandbyException",
    "RetriableException",
    "ObserverRetryOnActiveException",
}
_RENAMES = tuple(step for step in Step if step.is_rename)
_FILE_IN_PATH = "{failure}: a part of the path is a file, not a folder; choose another path"
_OTHER_NAME = "{what}; use a shorter or simpler name"

_BLOCKED = {"ParentNotDirectoryException", "NotDirectoryException"}
_MAX_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class RpcFailure:
    """An error of the server or of the library."""

    #: Name of the exception, without its package.
    kind: str
    #: One line of text.
    message: str

    @classmethod
    def of(cls, error: BaseException) -> RpcFailure:
        """Parse an exception of the library."""
        text = str(error)
        match = _CLASS.match(text)
        if match:
            name, message = match[1].rpartition(".")[2].rpartition("$")[2], match[2]
        elif isinstance(error, RuntimeError):
            library_error = _OWN_KIND.match(text)
            name, message = library_error[1] if library_error else text, text
        else:
            is_plain = isinstance(error, OSError) and not isinstance(error, _OWN_CLASSES)
            name, message = "OSError" if is_plain else type(error).__name__, text
        line = re.split(r"\\n|\n", message)[0]
        return cls(name, line if len(line) <= _MAX_SHOWN_CHARACTERS else f"{line[:_MAX_SHOWN_CHARACTERS]}...")


def is_connection_lost(error: BaseException) -> bool:
    """Whether there is no response: a timeout, or a connection that was lost or could not be established."""
    return isinstance(error, OverdueError) or type(error) is OSError  # error responses raise subclasses


def is_parent_missing(error: BaseException) -> bool:
    """Whether a rename was rejected, without an effect, because the folder of the new name does not exist."""
    return isinstance(error, FileNotFoundError) and str(error).startswith(_NO_PARENT)


def is_not_empty(error: BaseException) -> bool:
    """Whether a delete was rejected because the path is a folder with files."""
    return RpcFailure.of(error).kind == "PathIsNotEmptyDirectoryException"


def is_missing_path(error: BaseException) -> bool:
    """Whether there is no file at the path, possibly because a part of the path is a file."""
    return isinstance(error, FileNotFoundError | IsADirectoryError) or RpcFailure.of(error).kind in _BLOCKED


#: Codes are names of exceptions of the server, the library or Python.
_ERRORS = (
    # Another process deleted it, or the library repeated a successful rename whose response was lost.
    ErrorRow(
        AmbiguousWriteError,
        "{failure}: its temporary file does not exist",
        codes={"FileNotFoundError"},
        operations=_RENAMES,
        text=re.compile(f"^{_NO_SOURCE}"),
    ),
    ErrorRow(
        FileMissingError,
        MISSING,
        codes={"FileNotFoundError", "IsADirectoryError", *_BLOCKED},
        operations={Step.READ, Step.STAT},
    ),
    ErrorRow(
        FileExistsAlreadyError,
        "{path!r} under {root} is a folder; choose another name",
        operations={Step.CREATE},
        text=_IS_FOLDER,
    ),
    ErrorRow(FileExistsAlreadyError, EXISTS, codes={"FileExistsError"}, operations={Step.CREATE}),
    ErrorRow(StorageError, _FILE_IN_PATH, codes=_BLOCKED),
    ErrorRow(StorageError, _FILE_IN_PATH, codes={"FileExistsError"}, operations={Step.FOLDER}),
    ErrorRow(InvalidLocationError, _OTHER_NAME, codes={"InvalidPathException", "PathComponentTooLongException"}),
    ErrorRow(InvalidLocationError, _OTHER_NAME, text=re.compile("Pathname too long")),
    ErrorRow(
        StorageError,
        "{failure}: it is a folder; remove it",
        operations={Step.WRITE},
        text=_IS_FOLDER,
    ),
    ErrorRow(
        StoragePermissionError,
        "{what}; check the user (HADOOP_USER_NAME or Kerberos), and the owner and mode of the folder",
        codes={"AccessControlException", "AuthorizationException", "InvalidToken", "SaslException"},
    ),
    ErrorRow(
        StoragePermissionError,
        "{failure}: the credentials are missing or invalid ({kind}); check the Kerberos tickets and the configuration"
        " of Hadoop",
        codes={"GSSAPIError", "NoSASLMechanism", "SASLError"},
    ),
    ErrorRow(
        StorageFullError,
        FULL,
        codes={
            "DSQuotaExceededException", "MaxDirectoryItemsExceededException", "NSQuotaExceededException",
            "QuotaByStorageTypeExceededException", "QuotaExceededException",
        },
    ),
    ErrorRow(
        StorageFullError,
        "{failure}: no DataNode accepts a block; free space or check the DataNodes, then retry",
        text=_NO_SPACE,
    ),
    ErrorRow(ThrottledError, SLOWER, operations=set(Step) - set(_RENAMES), text=re.compile("too busy")),
    # The server may have completed the rename before it stopped, and the library has repeated it.
    ErrorRow(AmbiguousWriteError, "{what}", codes=_TEMPORARY_EXCEPTIONS, operations=_RENAMES),
    ErrorRow(TransientError, RETRY, codes=_TEMPORARY_EXCEPTIONS),
    ErrorRow(TransientError, "{failure}: no DataNode can be reached; retry", text=_NO_REPLICA),
    ErrorRow(
        AmbiguousWriteError,
        "{what}",
        codes={
            "AlreadyBeingCreatedException", "BlocksNotFound", "ChecksumError", "DataTransferError", "FileExistsError",
            "InvalidRPCResponse", "LeaseExpiredException", "NotReplicatedYetException", "OperationFailed",
        },
    ),
    ErrorRow(
        UnreachableError,
        "{what}; check the address of the NameNode, and that the NameNode and the DataNodes run, then retry",
        codes={"OSError"},
        operations={step for step in Step if not step.changes_files},
        text=_NOT_CONNECTED,
    ),
    ErrorRow(AmbiguousWriteError, "{what}", codes={"IsADirectoryError", "OSError"}),
    # Another process deleted the temporary file while it was written.
    ErrorRow(TransientError, RETRY, codes={"FileNotFoundError"}, operations={Step.STAGE}),
    ErrorRow(
        StorageError,
        "{failure}: the name service is unknown; add the port of a NameNode to the root, or set the option 'namenodes'"
        " or the variable HADOOP_CONF_DIR",
        text=re.compile("No NameNode hosts found"),
    ),
    ErrorRow(StorageError, "{what} ({kind}); check the request and the server's log"),
)  # fmt: skip


def typed_error(request: Request, error: BaseException, limit_seconds: float) -> TrinityLakeError:
    """Return the typed error for an exception of a step.

    Args:
        request: The step that failed.
        error: One of ``FAILURES``.
        limit_seconds: Time limit of the step, for the message.
    """
    if isinstance(error, ForkedError):
        return StorageError(
            f"{request.failure}: hdfs-native does not work in a process that was forked after its parent used HDFS;"
            " start processes with 'spawn' or 'forkserver'",
            path=request.path,
        )
    if isinstance(error, OverdueError):
        if not error.begun:
            return UnreachableError(f"{request.failure}: {error}; check the servers", path=request.path)
        return _ambiguous_error(request, f"{request.failure}: no response within {limit_seconds:.3g} s")
    failure = RpcFailure.of(error)
    row = find_row(_ERRORS, request.step, None, failure.kind, failure.message)
    what = f"{request.failure}: {failure.message}"
    message = row.message.format(
        failure=request.failure, what=what, kind=failure.kind, path=request.path, root=request.root
    )
    if row.error is AmbiguousWriteError:
        return _ambiguous_error(request, message)
    return row.error(message, path=request.path)


def _ambiguous_error(request: Request, what: str) -> StorageError:
    return ambiguous_error(what, request.path, changes_files=request.step.changes_files)
