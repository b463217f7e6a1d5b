"""The meaning of an S3 server's answer, or the lack of one, for the caller of a storage (S7).

This module is pure, and every S3 client uses it. Servers give the same failure different bodies, and client libraries
give it different exceptions. So a client reduces a failure to status, error code and message, or to the kind of a
:class:`TransportFailure`. It asks here for the typed error.
"""

from __future__ import annotations

from dataclasses import dataclass

from trinitylake_ops.errors import (
    FileExistsAlreadyError,
    FileMissingError,
    InvalidLocationError,
    StorageError,
    StorageFullError,
    TrinityLakeError,
)
from trinitylake_ops.storage.http.aws import credentials_error, transient_error
from trinitylake_ops.storage.http.requests import Request, StorageRequest


@dataclass(frozen=True, slots=True)
class S3Request(StorageRequest):
    """One request to a bucket."""

    @property
    def bucket(self) -> str:
        """Name of the bucket in the root URI."""
        return self.root.removeprefix("s3://").partition("/")[0]


_WRONG_PLACE = {
    "AuthorizationHeaderMalformed", "IllegalLocationConstraint", "IllegalLocationConstraintException",
    "IncorrectEndpoint", "InvalidRegionName", "PermanentRedirect", "Redirect", "TemporaryRedirect",
}  # fmt: skip
_NAMELESS = {"InvalidBucketName", "InvalidObjectName", "InvalidURI", "KeyTooLong", "KeyTooLongError"}
_FULL = {
    "InsufficientCapacity", "InsufficientStorage", "InsufficientStorageSpace", "NotEnoughDiskSpace", "QuotaExceeded",
    "StorageFull", "XMinioStorageFull",
}  # fmt: skip
_TOO_LARGE = {"EntityTooLarge", "MaxMessageLengthExceeded"}


def is_range_beyond_end(status: int | None, code: str | None) -> bool:
    """Whether the answer says that the file exists and the range starts at or past its end."""
    return status == 416 or code == "InvalidRange"


def error_from_response(
    request: S3Request, status: int | None, code: str | None, message: str | None
) -> TrinityLakeError:
    """Return the typed error for an answer of the server: one line that says what to do.

    ``code`` is S3's own word (``NoSuchKey``). Where the answer has no body (HEAD), it is None or, with some client
    libraries, the bare status. ``message`` is the server's text, shown shortened, on one line and redacted. ``status``
    may be None for a file's own result in a batch.
    """
    code = None if not code or code.isdigit() else code
    what = f"{request.failure}: the server says {request.described(status, code, message)}"
    return (
        (None if _is_of_the_file(code) else credentials_error(request, status, code, "bucket"))
        or _location_error(request, what, status, code)
        or _file_error(request, what, status, code)
        or transient_error(request, what, status, code)
        or StorageError(f"{what}; check the request and the server's log", path=request.path)
    )


def _is_of_the_file(code: str | None) -> bool:
    """Whether a refusal with the status of one of credentials is about the file or its place."""
    return code in _FULL | _WRONG_PLACE or code == "InvalidObjectState"


def _location_error(request: S3Request, what: str, status: int | None, code: str | None) -> TrinityLakeError | None:
    whole_bucket = request.operation not in (Request.READ, Request.STAT, Request.DELETE)
    if code == "NoSuchBucket" or (status == 404 and code is None and whole_bucket):
        return StorageError(
            f"{request.failure}: the bucket {request.bucket!r} does not exist; check its name and the options "
            "'endpoint' and 'region', or create it",
            path=request.path,
        )
    if code in _WRONG_PLACE or (status is not None and 300 <= status < 400):
        return StorageError(
            f"{what}: the bucket lives elsewhere; set the option 'region' or 'endpoint' to its place", path=request.path
        )
    if status == 400 and code is None and not request.operation.changes_files:
        return StorageError(
            f"{what}; check that the credentials have not expired and that the option 'region' is right",
            path=request.path,
        )
    return None


def _file_error(request: S3Request, what: str, status: int | None, code: str | None) -> TrinityLakeError | None:
    path = request.path
    if code == "NoSuchKey" or (status == 404 and code is None):
        return FileMissingError(f"there is no file {path!r} under {request.root}", path=path)
    if status == 412 and request.operation is Request.CREATE:
        return FileExistsAlreadyError(f"a file stands at {path!r} already; choose another name", path=path)
    if code == "InvalidObjectState":
        return StorageError(f"{what}: the file is archived; restore it to a class that can be read", path=path)
    if code in _NAMELESS:
        return InvalidLocationError(f"{what}; use a shorter or plainer name", path=path)
    if code in _TOO_LARGE or status == 413:
        return StorageError(f"{what}: the file is too large for one request; write smaller files", path=path)
    if request.operation is Request.CREATE and (status == 501 or code == "NotImplemented"):
        return StorageError(
            f"{what}: the server cannot do a create under the condition If-None-Match; use another S3 server", path=path
        )
    if code in _FULL or status == 507:
        return StorageFullError(f"{what}; free space or raise the quota, then retry", path=path)
    return None
