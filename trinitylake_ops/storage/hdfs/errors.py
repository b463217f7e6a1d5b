"""Calls of HDFS, and their failures as errors of a storage.

The library raises FileNotFoundError, FileExistsError and OSError with a text alone. For all else it raises RuntimeError
with the class and the message of the server's exception, or with the kind of its own failure.

hdfs-native waits without a limit for the answer of a server that is silent. Such a call goes on in a thread of its own,
which ends with the connection or with the process.
"""

from __future__ import annotations

import gc
import os
import queue
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from trinitylake_ops.errors import (
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
from trinitylake_ops.storage.http.requests import ambiguous_error

T = TypeVar("T")

#: So many threads may hang in calls that were given up.
MAX_HANGING = 64


class OverdueError(Exception):
    """A call did not end in time, or was not begun because too many others hang."""

    def __init__(self, reason: str, *, begun: bool):
        super().__init__(reason)
        self.begun = begun


class ForkedError(Exception):
    """The process was forked after the library was used, which has threads and sockets that a child must not use."""


class _Worker:
    """A thread that makes one call after the other."""

    def __init__(self, pool: _Pool):
        self._pool = pool
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="trinitylake-hdfs", daemon=True).start()

    def make(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._work.put((call, future))
        return future

    def _run(self) -> None:
        while True:
            call, future = self._work.get()
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
                future.set_exception(error.with_traceback(None))  # its frames would keep what the call was made with
                del error
            else:
                future.set_result(result)
                del result
            del call, future
            self._pool.release_worker(self)


class _Pool:
    def __init__(self) -> None:
        self.was_forked = False
        self._is_used = False
        self.after_fork_in_child()

    def after_fork_in_child(self) -> None:
        """Start anew, in a forked child: the threads are not there."""
        if self._is_used:
            # Among its parent's garbage may be a client that was given up. To destroy it would wait for its threads.
            gc.freeze()
        self.was_forked = self.was_forked or self._is_used
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._hanging: set[_Worker] = set()

    def call(self, call: Callable[[], T], seconds: float) -> T:
        if self.was_forked:
            raise ForkedError
        with self._lock:
            self._is_used = True
            if len(self._hanging) >= MAX_HANGING:
                raise OverdueError(f"{MAX_HANGING} earlier requests still wait for an answer", begun=False)
            worker = self._idle.pop() if self._idle else None
        worker = worker or _Worker(self)
        future = worker.make(call)
        try:
            return future.result(seconds)
        except TimeoutError:
            with self._lock:
                if not future.done():
                    self._hanging.add(worker)
                    raise OverdueError("time-out", begun=True) from None
            return future.result()

    def release_worker(self, worker: _Worker) -> None:
        with self._lock:
            self._hanging.discard(worker)
            self._idle.append(worker)


_pool = _Pool()
os.register_at_fork(after_in_child=_pool.after_fork_in_child)


def call_within(seconds: float, call: Callable[[], T]) -> T:
    """Make a call in another thread and return or raise what it does.

    Raises OverdueError after so many seconds, and ForkedError in a child of a process that made such calls.
    """
    return _pool.call(call, seconds)


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


_CLASS = re.compile(r'^(?:Fatal)?RPCError\("([A-Za-z0-9_.$]+)", "(.*)"\)$', re.DOTALL)
_OWN_KIND = re.compile(r"^([A-Za-z]+)\(")
_NOT_CONNECTED = re.compile(r"Connection refused|failed to lookup address|No route to host|Network is unreachable")
_NO_REPLICA = re.compile(r"could only be replicated to (\d+) nodes")
_NO_DATANODES = re.compile(r"There are 0 datanode\(s\) running|[1-9]\d* node\(s\) are excluded")
_NO_SOURCE = "rename source "
_NO_PARENT = "rename destination parent "

_NOT_ALLOWED = {"AccessControlException", "AuthorizationException", "SaslException", "InvalidToken"}
_NO_CREDENTIALS = {"SASLError", "GSSAPIError", "NoSASLMechanism"}
_NOT_NOW = {"SafeModeException", "StandbyException", "RetriableException", "ObserverRetryOnActiveException"}
_FULL = {
    "NSQuotaExceededException", "DSQuotaExceededException", "QuotaByStorageTypeExceededException",
    "QuotaExceededException", "MaxDirectoryItemsExceededException",
}  # fmt: skip
_NAMELESS = {"InvalidPathException", "PathComponentTooLongException"}
_BLOCKED = {"ParentNotDirectoryException", "NotDirectoryException"}
_LOST_ON_THE_WAY = {"DataTransferError", "BlocksNotFound", "ChecksumError", "OperationFailed", "InvalidRPCResponse"}
_LEASE_EXPIRED = {"LeaseExpiredException", "AlreadyBeingCreatedException", "NotReplicatedYetException"}
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
            name, message = type(error).__name__, text
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
    rpc_failure = RpcFailure.of(error)
    return (
        _name_error(request, error, rpc_failure)
        or _permission_or_space_error(request, rpc_failure)
        or _transient_error(request, error, rpc_failure)
    )


def _name_error(request: Request, error: BaseException, rpc_failure: RpcFailure) -> TrinityLakeError | None:
    path, step = request.path, request.step
    what = f"{request.failure}: {rpc_failure.message}"
    if step.is_rename and isinstance(error, FileNotFoundError) and rpc_failure.message.startswith(_NO_SOURCE):
        # Somebody tidied up, or a client repeated a rename whose answer was lost: then it was done.
        return _ambiguous_error(request, f"{request.failure}: its temporary file is gone")
    if step in (Step.READ, Step.STAT) and is_missing_path(error):
        return FileMissingError(f"there is no file {path!r} under {request.root}", path=path)
    has_folder = "must both be directories" in rpc_failure.message
    if step is Step.CREATE and (has_folder or isinstance(error, FileExistsError)):
        stands = "a folder" if has_folder else "a file"
        return FileExistsAlreadyError(f"{stands} stands at {path!r} already; choose another name", path=path)
    if rpc_failure.kind in _BLOCKED or (step is Step.FOLDER and isinstance(error, FileExistsError)):
        return StorageError(
            f"{request.failure}: a file stands where a folder is needed; choose another path", path=path
        )
    if rpc_failure.kind in _NAMELESS or "Pathname too long" in rpc_failure.message:
        return InvalidLocationError(f"{what}; use a shorter or plainer name", path=path)
    if step is Step.WRITE and has_folder:
        return StorageError(f"{request.failure}: a folder stands there; remove it", path=path)
    return None


def _permission_or_space_error(request: Request, rpc_failure: RpcFailure) -> TrinityLakeError | None:
    what = f"{request.failure}: {rpc_failure.message}"
    if rpc_failure.kind in _NOT_ALLOWED:
        return StoragePermissionError(
            f"{what}; check the user (HADOOP_USER_NAME or Kerberos), and owner and mode of the folder",
            path=request.path,
        )
    if rpc_failure.kind in _NO_CREDENTIALS:
        return StoragePermissionError(
            f"{request.failure}: the server asks for credentials that are not there or not valid ({rpc_failure.kind});"
            " check Kerberos' tickets and Hadoop's configuration",
            path=request.path,
        )
    if rpc_failure.kind in _FULL:
        return StorageFullError(f"{what}; free space or raise the quota, then retry", path=request.path)
    if _NO_REPLICA.search(rpc_failure.message) and not _NO_DATANODES.search(rpc_failure.message):
        return StorageFullError(
            f"{request.failure}: no DataNode takes another block; free space or check the DataNodes, then retry",
            path=request.path,
        )
    return None


def _transient_error(request: Request, error: BaseException, rpc_failure: RpcFailure) -> StorageError:
    what = f"{request.failure}: {rpc_failure.message}"
    if "too busy" in rpc_failure.message and not request.step.is_rename:
        return ThrottledError(f"{what}; retry at a slower pace", path=request.path)
    if rpc_failure.kind in _NOT_NOW:
        # A rename may have been done before the server stopped, and the library has repeated it since.
        return (
            _ambiguous_error(request, what)
            if request.step.is_rename
            else TransientError(f"{what}; retry", path=request.path)
        )
    if _NO_REPLICA.search(rpc_failure.message):
        return TransientError(f"{request.failure}: no DataNode can be reached; retry", path=request.path)
    if rpc_failure.kind in _LEASE_EXPIRED or rpc_failure.kind in _LOST_ON_THE_WAY or isinstance(error, FileExistsError):
        return _ambiguous_error(request, what)
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        if _NOT_CONNECTED.search(rpc_failure.message) and not request.step.changes_files:
            return UnreachableError(
                f"{what}; check the address of the NameNode, and that it and the DataNodes run, then retry",
                path=request.path,
            )
        return _ambiguous_error(request, what)
    if request.step is Step.STAGE and isinstance(error, FileNotFoundError):
        return TransientError(f"{what}; retry", path=request.path)  # somebody removed it while it was written
    if "No NameNode hosts found" in rpc_failure.message:
        return StorageError(
            f"{request.failure}: the name service is not known; give the port of a NameNode in the root, the option"
            " 'namenodes', or Hadoop's configuration by HADOOP_CONF_DIR",
            path=request.path,
        )
    return StorageError(f"{what} ({rpc_failure.kind}); check the request and the server's log", path=request.path)


def _ambiguous_error(request: Request, what: str) -> StorageError:
    return ambiguous_error(what, request.path, changes_files=request.step.changes_files)
