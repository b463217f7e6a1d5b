"""From the exceptions of obstore to typed errors of S3 (S7)."""

from __future__ import annotations

from obstore.exceptions import UnauthenticatedError

from trinitylake_ops.errors import StorageError, TrinityLakeError
from trinitylake_ops.storage.aws.answers import error_without_credentials
from trinitylake_ops.storage.remote.obstore_failures import (
    has_no_answer,
    reason,
    server_message,
    status_and_code,
    transport_failure,
)
from trinitylake_ops.storage.remote.requests import TransportFailure, error_from_transport
from trinitylake_ops.storage.s3.answers import S3Request, error_from_answer

_PROVIDER = "External AWS credential provider"


def typed_error(request: S3Request, error: BaseException, endpoint: str) -> TrinityLakeError:
    """Return the typed error for the end of a request, one of obstore's."""
    text = str(error)
    status, code = status_and_code(error)
    if status is not None:
        return error_from_answer(request, status, code, server_message(error))
    if isinstance(error, UnauthenticatedError) and _PROVIDER in text:
        return error_without_credentials(request, "AWS's environment gives no valid credentials")
    if has_no_answer(error):
        return error_from_transport(request, transport_failure(error), endpoint, reason(error))
    if request.operation.changes_files:
        # The server may have done its work, though obstore cannot read the answer.
        return error_from_transport(request, TransportFailure.NO_ANSWER, endpoint, "an answer that cannot be read")
    return StorageError(
        f"{request.failure}: obstore cannot read the server's answer; try the option 'client' = 's3fs', "
        "and check the option 'endpoint'",
        path=request.path,
    )
