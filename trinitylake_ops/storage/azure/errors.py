"""The meaning of an answer of Azure's Blob service for the caller of a storage (S7).

This module is pure. Both clients reduce a failure to status, error code and message.
"""

from __future__ import annotations

from dataclasses import dataclass

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
)
from trinitylake_ops.storage.http.requests import Request, StorageRequest

#: A hierarchical account says so of a file's name that is a folder, or lies below a file.
NO_FILE_CODES = frozenset(
    {"BlobNotFound", "DirectoryIsNotEmpty", "DirectoryNotEmpty", "PathNotFound", "ResourceNotFound"}
)
#: What a hierarchical account says to requests that it does not have.
NO_BATCH_CODES = frozenset(
    {
        "BlobOverwritePermissionNotSupported", "FeatureNotYetSupportedForHierarchicalNamespaceAccounts",
        "HierarchicalNamespaceNotSupported", "NotImplemented", "OperationNotSupported", "UnsupportedHttpVerb",
    }
)  # fmt: skip

_WRONG_CREDENTIALS = {
    "AuthenticationFailed", "InvalidAuthenticationInfo", "NoAuthenticationInformation", "MissingAuthentication",
}  # fmt: skip
_NOT_ALLOWED = {
    "AccountIsDisabled", "AuthorizationFailure", "AuthorizationPermissionMismatch", "AuthorizationProtocolMismatch",
    "AuthorizationResourceTypeMismatch", "AuthorizationServiceMismatch", "AuthorizationSourceIPMismatch",
    "BlobImmutableDueToLegalHold", "BlobImmutableDueToPolicy", "InsufficientAccountPermissions",
    "KeyBasedAuthenticationNotPermitted", "PublicAccessNotPermitted", "UnauthorizedBlobOverwrite",
}  # fmt: skip
_NO_CONTAINER = {"ContainerBeingDeleted", "ContainerDisabled", "ContainerNotFound", "FilesystemNotFound"}
_NAMELESS = {"InvalidResourceName", "InvalidUri", "OutOfRangeInput", "InvalidSourceUri"}
_SLOWER = {"ServerBusy", "TooManyRequests", "AccountIngressLimitExceeded"}
_FULL = {"InsufficientStorage", "AccountQuotaExceeded", "AccountStorageLimitExceeded", "QuotaExceeded"}
_DAMAGED_ON_THE_WAY = {"Crc64Mismatch", "Md5Mismatch"}
_TAKEN = {"BlobAlreadyExists", "ConditionNotMet", "LeaseIdMissing", "PathAlreadyExists"}
_LEASED = {"LeaseIdMissing", "LeaseIdMismatchWithBlobOperation", "LeaseLost", "LeaseNotPresentWithBlobOperation"}
_ARCHIVED = {"BlobArchived", "BlobBeingRehydrated"}


@dataclass(frozen=True, slots=True)
class AzureRequest(StorageRequest):
    """One request to a container."""

    @property
    def container(self) -> str:
        """Name of the container in the root URI."""
        return self.root.partition("://")[2].partition("/")[0].partition("@")[0]


def error_from_response(
    request: AzureRequest, status: int | None, code: str | None, message: str | None
) -> TrinityLakeError:
    """Return the typed error for an answer of the service: one line that says what to do.

    ``code`` is the service's own word (``BlobNotFound``), None if the answer has none, as that of a proxy.
    """
    what = f"{request.failure}: the service says {request.described(status, code, message)}"
    return (
        _credentials_error(request, status, code)
        or _location_error(request, what, status, code)
        or _file_error(request, what, status, code)
        or _transient_error(request, what, status, code)
        or StorageError(f"{what}; check the request and the storage options", path=request.path)
    )


def error_without_credentials(request: AzureRequest, reason: str) -> StoragePermissionError:
    """Return the error for a request that could not be authorized; nothing was sent."""
    return StoragePermissionError(
        f"{request.failure}: {request.safe(reason)}; give one of the options 'account_key', 'sas_token' and"
        " 'connection_string', or set up credentials of Azure",
        path=request.path,
    )


def _credentials_error(request: AzureRequest, status: int | None, code: str | None) -> TrinityLakeError | None:
    # The service's own words are left out, as they may quote the request and its signature.
    if code in _WRONG_CREDENTIALS:
        advice = "the credentials are wrong or have expired; check them, and the clock of this machine"
    elif code in _NOT_ALLOWED or status in (401, 403):
        advice = "not allowed; check the credentials and their permissions on the container"
    else:
        return None
    response = request.described(status, code)
    return StoragePermissionError(f"{request.failure}: {advice} (the service says {response})", path=request.path)


def _location_error(request: AzureRequest, what: str, status: int | None, code: str | None) -> TrinityLakeError | None:
    whole_container = request.operation not in (Request.READ, Request.STAT, Request.DELETE, Request.CLOCK)
    if code in _NO_CONTAINER or (status == 404 and code is None and whole_container):
        return StorageError(
            f"{request.failure}: the container {request.container!r} does not exist; check its name, the account and"
            " the option 'endpoint', or create it",
            path=request.path,
        )
    if status is not None and 300 <= status < 400:
        return StorageError(f"{what}: the account lives elsewhere; set the option 'endpoint'", path=request.path)
    return None


def _file_error(request: AzureRequest, what: str, status: int | None, code: str | None) -> TrinityLakeError | None:
    path = request.path
    if code in NO_FILE_CODES or status == 404:
        return FileMissingError(f"there is no file {path!r} under {request.root}", path=path)
    if request.operation is Request.CREATE and (status == 412 or code in _TAKEN):
        return FileExistsAlreadyError(f"a file stands at {path!r} already; choose another name", path=path)
    if code in _LEASED:
        return StorageError(f"{what}: somebody holds a lease of the blob; break it", path=path)
    if code in _ARCHIVED:
        return StorageError(f"{what}: the blob is archived; move it to a tier that can be read", path=path)
    if code in _NAMELESS:
        return InvalidLocationError(f"{what}; use a shorter or plainer name", path=path)
    if code == "RequestBodyTooLarge" or status == 413:
        return StorageError(f"{what}: the file is too large for one request; write smaller files", path=path)
    if code in _FULL or status == 507:
        return StorageFullError(f"{what}; free space or raise the quota, then retry", path=path)
    return None


def _transient_error(request: AzureRequest, what: str, status: int | None, code: str | None) -> TrinityLakeError | None:
    if status == 408 or (code is None and status in (409, 429) and request.operation.changes_files):
        # The service names its reason. A proxy that names none may still hold the request.
        return request.ambiguous_error(what)
    if status == 429 or code in _SLOWER:
        return ThrottledError(f"{what}; retry at a slower pace", path=request.path)
    if code in _DAMAGED_ON_THE_WAY:
        return TransientError(f"{what}: the data was damaged on its way; retry", path=request.path)
    if status == 409 and code is None:
        return TransientError(f"{what}: another request for the same name is under way; retry", path=request.path)
    if status is not None and status >= 500 and status != 501:
        return request.ambiguous_error(what)
    return None
