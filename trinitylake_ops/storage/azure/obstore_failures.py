"""From the exceptions of obstore to typed errors (S7), by the dump of the Rust error that each ends with."""

from __future__ import annotations

import re

from obstore.exceptions import UnauthenticatedError

from trinitylake_ops.errors import StorageError, TrinityLakeError
from trinitylake_ops.storage.azure.answers import AzureRequest, error_from_answer, error_without_credentials
from trinitylake_ops.storage.remote.obstore_failures import (
    has_no_answer,
    reason,
    server_message,
    status_and_code,
    transport_failure,
)
from trinitylake_ops.storage.remote.requests import TransportFailure, error_from_transport

_PROVIDER = "External Azure credential provider"
# obstore itself looks whether a range starts at the end, where the service answers it.
_STARTS_AT_END = re.compile(r"^ *source: InvalidRangeRequest \{\n +source: StartTooLarge", re.MULTILINE)


def is_beyond_end(error: BaseException) -> bool:
    """Whether an exception says that the file exists and the range starts at or past its end."""
    status, code = status_and_code(error)
    return status == 416 or code == "InvalidRange" or _STARTS_AT_END.search(str(error)) is not None


def typed_error(request: AzureRequest, error: BaseException, endpoint: str) -> TrinityLakeError:
    """Return the typed error for the end of a request, one of obstore's exceptions."""
    text = str(error)
    status, code = status_and_code(error)
    if status is not None:
        return error_from_answer(request, status, code, server_message(error))
    if isinstance(error, UnauthenticatedError) or _PROVIDER in text:
        return error_without_credentials(request, "there are no valid credentials")
    if has_no_answer(error):
        return error_from_transport(request, transport_failure(error), endpoint, reason(error))
    if request.operation.changes_files:
        # The service may have done its work, though obstore cannot read the answer.
        return error_from_transport(request, TransportFailure.NO_ANSWER, endpoint, "an answer that cannot be read")
    return StorageError(
        f"{request.failure}: obstore cannot read the service's answer; try the option 'client' ="
        " 'azure-storage-blob', and check the option 'endpoint'",
        path=request.path,
    )
