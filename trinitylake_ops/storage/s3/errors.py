"""The error table of S3 (S7), which all S3 clients use."""

from __future__ import annotations

from trinitylake_ops.errors import (
    FileExistsAlreadyError,
    FileMissingError,
    InvalidLocationError,
    StorageError,
    StorageFullError,
    TrinityLakeError,
)
from trinitylake_ops.storage.error_table import EXISTS, FULL, MISSING, ErrorRow
from trinitylake_ops.storage.http.aws import PERMISSION_CODES, PERMISSION_STATUSES, TRANSIENT
from trinitylake_ops.storage.http.requests import (
    CHANGES,
    OF_ONE_FILE,
    REDIRECTS,
    Request,
    StorageRequest,
    error_from_table,
)

_NO_BUCKET = (
    "{failure}: the bucket {bucket!r} does not exist; check its name and the options 'endpoint' and 'region', or create"
    " it"
)
_WRONG_LOCATION = "{what}: the bucket is in another region or on another server; set the option 'region' or 'endpoint'"

#: Codes for files and buckets precede the statuses 401 and 403, because some servers combine the two.
_ERRORS = (
    *PERMISSION_CODES,
    ErrorRow(
        StorageError,
        _WRONG_LOCATION,
        codes={
            "AuthorizationHeaderMalformed", "IllegalLocationConstraint", "IllegalLocationConstraintException",
            "IncorrectEndpoint", "InvalidRegionName", "PermanentRedirect", "Redirect", "TemporaryRedirect",
        },
    ),
    ErrorRow(
        StorageError,
        "{what}: the file is archived; restore it to a storage class that can be read",
        codes={"InvalidObjectState"},
    ),
    ErrorRow(
        StorageFullError,
        FULL,
        codes={
            "InsufficientCapacity", "InsufficientStorage", "InsufficientStorageSpace", "NotEnoughDiskSpace",
            "QuotaExceeded", "StorageFull", "XMinioStorageFull",
        },
    ),
    PERMISSION_STATUSES,
    ErrorRow(StorageError, _NO_BUCKET, codes={"NoSuchBucket"}),
    ErrorRow(StorageError, _WRONG_LOCATION, statuses=REDIRECTS),
    ErrorRow(FileMissingError, MISSING, codes={"NoSuchKey"}),
    ErrorRow(FileMissingError, MISSING, bare_statuses={404}, operations=OF_ONE_FILE),
    ErrorRow(StorageError, _NO_BUCKET, bare_statuses={404}),
    ErrorRow(
        StorageError,
        "{what}; check that the credentials have not expired and that the option 'region' is correct",
        bare_statuses={400},
        operations=set(Request) - set(CHANGES),
    ),
    ErrorRow(FileExistsAlreadyError, EXISTS, statuses={412}, operations={Request.CREATE}),
    ErrorRow(
        InvalidLocationError,
        "{what}; use a shorter or simpler name",
        codes={"InvalidBucketName", "InvalidObjectName", "InvalidURI", "KeyTooLong", "KeyTooLongError"},
    ),
    ErrorRow(
        StorageError,
        "{what}: the file is too large for one request; write smaller files",
        codes={"EntityTooLarge", "MaxMessageLengthExceeded"},
        statuses={413},
    ),
    ErrorRow(
        StorageError,
        "{what}: the server does not support creates with the condition If-None-Match; use another S3 server",
        codes={"NotImplemented"},
        statuses={501},
        operations={Request.CREATE},
    ),
    ErrorRow(StorageFullError, FULL, statuses={507}),
    *TRANSIENT,
)  # fmt: skip


def is_range_beyond_end(status: int | None, code: str | None) -> bool:
    """Whether a response means that the file exists and the range starts at or past its end."""
    return status == 416 or code == "InvalidRange"


def error_from_response(
    request: StorageRequest, status: int | None, code: str | None, message: str | None
) -> TrinityLakeError:
    """Return the typed error for a response.

    Args:
        request: The request that failed.
        status: HTTP status. None for the result of one file in a batch.
        code: S3's error code, for example ``NoSuchKey``. A response without a body (HEAD) has none or, with some client
            libraries, the status.
        message: The server's message.
    """
    return error_from_table(_ERRORS, request, status, None if not code or code.isdigit() else code, message)
