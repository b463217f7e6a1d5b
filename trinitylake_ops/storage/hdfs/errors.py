"""Failures of calls of HDFS as errors of a storage.

The library raises FileNotFoundError, FileExistsError and OSError with a text alone. For all else it raises RuntimeError
with the class and the message of the server's exception, or with the kind of its own failure.
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
    """A call did not end in time, or was not begun because too many others hang."""

    def __init__(self, reason: str, *, begun: bool):
        super().__init__(reason)
        self.begun = begun


class ForkedError(Exception):
    """The process was forked after the library was used, which has threads and sockets that a child must not use."""


#: What hdfs-native raises, and what our calls into it do.
FAILURES = (OSError, RuntimeError, ForkedError, OverdueError)


class Step(Enum):
    """A request, or several, that have their effect together. The value is the verb that messages use."""

    READ = "read"
    STAT = "look up"
    STAGE = "write a temporary file for"  # no reader sees it
    FOLDER = "make the folder of"
    CREATE = "create"
    WRITE = "write"
    DELETE = "delete"
    LIST = "list"
    CLOCK = "ask for the time of"

    @property
    def changes_files(self) -> bool:
        """Whether the step may have had an effect that a reader sees, although no answer says so."""
        return self in (Step.CREATE, Step.WRITE, Step.DELETE)

    @property
    def is_rename(self) -> bool:
        """Whether the step gives a temporary file its name."""
        return self in (Step.CREATE, Step.WRITE)


@dataclass(frozen=True, slots=True)
class Request:
    """One step for a path relative to ``root``, a prefix for LIST."""

    step: Step
    path: str
    root: str

    @property
    def failure(self) -> str:
        """The first half of every message: what could not be done, and where."""
        if self.step is Step.CLOCK:
            return f"cannot {self.step.value} {self.root}"
        return f"cannot {self.step.value} {self.path!r} under {self.root}"


#: What the library raises for a failure that it names; every other OSError is one of the transport.
_OWN_CLASSES = (FileNotFoundError, FileExistsError, IsADirectoryError)
_CLASS = re.compile(r'^(?:Fatal)?RPCError\("([A-Za-z0-9_.$]+)", "(.*)"\)$', re.DOTALL)
_OWN_KIND = re.compile(r"^([A-Za-z]+)\(")
_NOT_CONNECTED = re.compile(r"Connection refused|failed to lookup address|No route to host|Network is unreachable")
_FOLDER_THERE = re.compile("must both be directories")
_NO_REPLICA = re.compile(r"could only be replicated to \d+ nodes")
_NO_SPACE = re.compile(
    r"(?s)^(?!.*(?:There are 0 datanode\(s\) running|[1-9]\d* node\(s\) are excluded))"
    r".*could only be replicated to \d+ nodes"
)
_NO_SOURCE = "rename source "
_NO_PARENT = "rename destination parent "
_NOT_NOW = {"SafeModeException", "StandbyException", "RetriableException", "ObserverRetryOnActiveException"}
_RENAMES = tuple(step for step in Step if step.is_rename)
_FILE_IN_THE_PATH = "{failure}: there is a file where a folder is needed; choose another path"
_OTHER_NAME = "{what}; use a shorter or plainer name"

_BLOCKED = {"ParentNotDirectoryException", "NotDirectoryException"}
_MAX_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class RpcFailure:
    """A failure as the server, or the library itself, names it."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> RpcFailure:
        """Reduce an exception of the library to the name of its class, without packages, and a line of text."""
        text = str(error)
        found = _CLASS.match(text)
        if found:
            name, message = found[1].rpartition(".")[2].rpartition("$")[2], found[2]
        elif isinstance(error, RuntimeError):
            own = _OWN_KIND.match(text)
            name, message = own[1] if own else text, text
        else:
            is_plain = isinstance(error, OSError) and not isinstance(error, _OWN_CLASSES)
            name, message = "OSError" if is_plain else type(error).__name__, text
        line = re.split(r"\\n|\n", message)[0]
        return cls(name, line if len(line) <= _MAX_SHOWN_CHARACTERS else f"{line[:_MAX_SHOWN_CHARACTERS]}...")


def is_connection_lost(error: BaseException) -> bool:
    """Whether no server answered: a time-out, a connection that broke or could not be made."""
    return isinstance(error, OverdueError) or type(error) is OSError  # an answer has a class of its own


def is_parent_missing(error: BaseException) -> bool:
    """Whether a rename was refused because the folder of the new name is not there. It had no effect."""
    return isinstance(error, FileNotFoundError) and str(error).startswith(_NO_PARENT)


def is_not_empty(error: BaseException) -> bool:
    """Whether a delete was refused because a folder with files has that name."""
    return RpcFailure.of(error).kind == "PathIsNotEmptyDirectoryException"


def is_missing_path(error: BaseException) -> bool:
    """Whether no file can have that name, since none is there, or a part of the path is a file."""
    return isinstance(error, FileNotFoundError | IsADirectoryError) or RpcFailure.of(error).kind in _BLOCKED


#: Codes are the names of exceptions: of the server, of the library, or of Python.
_ERRORS = (
    # Another process removed it, or a client repeated a rename whose response was lost: then it was done.
    ErrorRow(
        AmbiguousWriteError,
        "{failure}: its temporary file is gone",
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
        "there is a folder named {path!r} under {root}; choose another name",
        operations={Step.CREATE},
        text=_FOLDER_THERE,
    ),
    ErrorRow(FileExistsAlreadyError, EXISTS, codes={"FileExistsError"}, operations={Step.CREATE}),
    ErrorRow(StorageError, _FILE_IN_THE_PATH, codes=_BLOCKED),
    ErrorRow(StorageError, _FILE_IN_THE_PATH, codes={"FileExistsError"}, operations={Step.FOLDER}),
    ErrorRow(InvalidLocationError, _OTHER_NAME, codes={"InvalidPathException", "PathComponentTooLongException"}),
    ErrorRow(InvalidLocationError, _OTHER_NAME, text=re.compile("Pathname too long")),
    ErrorRow(
        StorageError,
        "{failure}: there is a folder of this name; remove it",
        operations={Step.WRITE},
        text=_FOLDER_THERE,
    ),
    ErrorRow(
        StoragePermissionError,
        "{what}; check the user (HADOOP_USER_NAME or Kerberos), and owner and mode of the folder",
        codes={"AccessControlException", "AuthorizationException", "InvalidToken", "SaslException"},
    ),
    ErrorRow(
        StoragePermissionError,
        "{failure}: the server asks for credentials that are not there or not valid ({kind}); check Kerberos' tickets"
        " and Hadoop's configuration",
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
        "{failure}: no DataNode takes another block; free space or check the DataNodes, then retry",
        text=_NO_SPACE,
    ),
    ErrorRow(ThrottledError, SLOWER, operations=set(Step) - set(_RENAMES), text=re.compile("too busy")),
    # A rename may have been done before the server stopped, and the library has repeated it since.
    ErrorRow(AmbiguousWriteError, "{what}", codes=_NOT_NOW, operations=_RENAMES),
    ErrorRow(TransientError, RETRY, codes=_NOT_NOW),
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
        "{what}; check the address of the NameNode, and that it and the DataNodes run, then retry",
        codes={"OSError"},
        operations={step for step in Step if not step.changes_files},
        text=_NOT_CONNECTED,
    ),
    ErrorRow(AmbiguousWriteError, "{what}", codes={"IsADirectoryError", "OSError"}),
    # Another process removed the temporary file while it was written.
    ErrorRow(TransientError, RETRY, codes={"FileNotFoundError"}, operations={Step.STAGE}),
    ErrorRow(
        StorageError,
        "{failure}: the name service is not known; give the port of a NameNode in the root, the option 'namenodes', or"
        " Hadoop's configuration by HADOOP_CONF_DIR",
        text=re.compile("No NameNode hosts found"),
    ),
    ErrorRow(StorageError, "{what} ({kind}); check the request and the server's log"),
)  # fmt: skip


def typed_error(request: Request, error: BaseException, limit_seconds: float) -> TrinityLakeError:
    """Return the typed error for the end of a step by one of ``FAILURES``: one line that says what to do."""
    if isinstance(error, ForkedError):
        return StorageError(
            f"{request.failure}: this process was forked after HDFS was used, and hdfs-native cannot go on in it;"
            " start processes by 'spawn' or 'forkserver'",
            path=request.path,
        )
    if isinstance(error, OverdueError):
        if not error.begun:
            return UnreachableError(f"{request.failure}: {error}; check the servers", path=request.path)
        return _ambiguous_error(request, f"{request.failure}: no answer within {limit_seconds:.3g} s")
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
