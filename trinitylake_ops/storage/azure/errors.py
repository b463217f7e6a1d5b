"""The error table of Azure's Blob service (S7)."""

from __future__ import annotations

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
)
from trinitylake_ops.storage.error_table import EXISTS, FULL, MISSING, SLOWER, ErrorRow
from trinitylake_ops.storage.http.requests import (
    CHANGES,
    OF_ONE_FILE,
    REDIRECTS,
    SERVER_ERRORS,
    Request,
    StorageRequest,
    error_from_table,
)

#: Error codes of a hierarchical account for a path that is a folder, or is below a file.
NO_FILE_CODES = frozenset(
    {"BlobNotFound", "DirectoryIsNotEmpty", "DirectoryNotEmpty", "PathNotFound", "ResourceNotFound"}
)
#: Error codes of a hierarchical account that does not support batches.
NO_BATCH_CODES = frozenset(
    {
        "BlobOverwritePermissionNotSupported", "FeatureNotYetSupportedForHierarchicalNamespaceAccounts",
        "HierarchicalNamespaceNotSupported", "NotImplemented", "OperationNotSupported", "UnsupportedHttpVerb",
    }
)  # fmt: skip

_NO_CONTAINER = (
    "{failure}: the container {bucket!r} does not exist; check its name, the account and the option 'endpoint', or"
    " create it"
)

_ERRORS = (
    # Permission errors omit the service's message, which may quote the request and its signature.
    ErrorRow(
        StoragePermissionError,
        "{failure}: the credentials are invalid or have expired; check them and the clock of this machine (the server"
        " responded {response})",
        codes={
            "AuthenticationFailed", "InvalidAuthenticationInfo", "MissingAuthentication", "NoAuthenticationInformation",
        },
    ),
    ErrorRow(
        StoragePermissionError,
        "{failure}: not allowed; check the credentials and their permissions on the container (the server responded"
        " {response})",
        codes={
            "AccountIsDisabled", "AuthorizationFailure", "AuthorizationPermissionMismatch",
            "AuthorizationProtocolMismatch", "AuthorizationResourceTypeMismatch", "AuthorizationServiceMismatch",
            "AuthorizationSourceIPMismatch", "BlobImmutableDueToLegalHold", "BlobImmutableDueToPolicy",
            "InsufficientAccountPermissions", "KeyBasedAuthenticationNotPermitted", "PublicAccessNotPermitted",
            "UnauthorizedBlobOverwrite",
        },
        statuses={401, 403},
    ),
    ErrorRow(
        StorageError,
        _NO_CONTAINER,
        codes={"ContainerBeingDeleted", "ContainerDisabled", "ContainerNotFound", "FilesystemNotFound"},
    ),
    ErrorRow(StorageError, "{what}: the account is on another server; set the option 'endpoint'", statuses=REDIRECTS),
    ErrorRow(FileMissingError, MISSING, bare_statuses={404}, operations={*OF_ONE_FILE, Request.CLOCK}),
    ErrorRow(StorageError, _NO_CONTAINER, bare_statuses={404}),
    ErrorRow(FileMissingError, MISSING, codes=NO_FILE_CODES, statuses={404}),
    ErrorRow(
        FileExistsAlreadyError,
        EXISTS,
        codes={"BlobAlreadyExists", "ConditionNotMet", "LeaseIdMissing", "PathAlreadyExists"},
        statuses={412},
        operations={Request.CREATE},
    ),
    ErrorRow(
        StorageError,
        "{what}: another client holds a lease on the blob; break the lease",
        codes={
            "LeaseIdMismatchWithBlobOperation", "LeaseIdMissing", "LeaseLost", "LeaseNotPresentWithBlobOperation",
        },
    ),
    ErrorRow(
        StorageError,
        "{what}: the blob is archived; move it to a tier that can be read",
        codes={"BlobArchived", "BlobBeingRehydrated"},
    ),
    ErrorRow(
        InvalidLocationError,
        "{what}; use a shorter or simpler name",
        codes={"InvalidResourceName", "InvalidSourceUri", "InvalidUri", "OutOfRangeInput"},
    ),
    ErrorRow(
        StorageError,
        "{what}: the file is too large for one request; write smaller files",
        codes={"RequestBodyTooLarge"},
        statuses={413},
    ),
    ErrorRow(
        StorageFullError,
        FULL,
        codes={"AccountQuotaExceeded", "AccountStorageLimitExceeded", "InsufficientStorage", "QuotaExceeded"},
        statuses={507},
    ),
    ErrorRow(AmbiguousWriteError, "{what}", statuses={408}),
    # A response without a code may be from a proxy that still forwards the request.
    ErrorRow(AmbiguousWriteError, "{what}", bare_statuses={409, 429}, operations=CHANGES),
    ErrorRow(
        ThrottledError,
        SLOWER,
        codes={"AccountIngressLimitExceeded", "ServerBusy", "TooManyRequests"},
        statuses={429},
    ),
    ErrorRow(
        TransientError, "{what}: the data was damaged in transit; retry", codes={"Crc64Mismatch", "Md5Mismatch"}
    ),
    ErrorRow(TransientError, "{what}: another request for the same path is in progress; retry", bare_statuses={409}),
    ErrorRow(StorageError, "{what}: the server does not support this request; use another server", statuses={501}),
    ErrorRow(AmbiguousWriteError, "{what}", statuses=SERVER_ERRORS),
    ErrorRow(StorageError, "{what}; check the request and the storage options"),
)  # fmt: skip


def error_from_response(
    request: StorageRequest, status: int | None, code: str | None, message: str | None
) -> TrinityLakeError:
    """Return the typed error for a response.

    Args:
        request: The request that failed.
        status: HTTP status.
        code: The service's error code, for example ``BlobNotFound``. None if the response has none, for example because
            it is from a proxy.
        message: The service's message.
    """
    return error_from_table(_ERRORS, request, status, code, message)


def error_without_credentials(request: StorageRequest, reason: str) -> StoragePermissionError:
    """Return the error for a request that could not be authorized and was not sent.

    Args:
        request: The request.
        reason: Why there are no credentials, which is redacted.
    """
    return StoragePermissionError(
        f"{request.failure}: {request.safe(reason)}; set one of the options 'account_key', 'sas_token' and"
        " 'connection_string', or configure Azure credentials",
        path=request.path,
    )
