"""Responses, and the status and error type in Iceberg's specification for each failure."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError as PydanticError
from pyiceberg.exceptions import (
    CommitFailedException,
    CommitStateUnknownException,
    NamespaceAlreadyExistsError,
    NamespaceNotEmptyError,
    NoSuchNamespaceError,
    NoSuchTableError,
    NoSuchViewError,
    TableAlreadyExistsError,
)
from pyiceberg.typedef import IcebergBaseModel

from trinitylake_ops import errors

logger = logging.getLogger(__name__)

UNKNOWN_STATE = "CommitStateUnknownException"
UNAVAILABLE = "ServiceUnavailableException"
_MAX_MESSAGE_CHARS = 2_000
_SHOWN_FAULTS = 3

#: Status and error type by exception class. The first match applies, so a subclass must precede its base class.
_STATUS: tuple[tuple[type[Exception], int, str], ...] = (
    (NoSuchNamespaceError, 404, "NoSuchNamespaceException"),
    (NoSuchTableError, 404, "NoSuchTableException"),
    (NoSuchViewError, 404, "NoSuchViewException"),
    (NamespaceAlreadyExistsError, 409, "AlreadyExistsException"),
    (TableAlreadyExistsError, 409, "AlreadyExistsException"),
    (NamespaceNotEmptyError, 409, "NamespaceNotEmptyException"),
    (CommitFailedException, 409, "CommitFailedException"),
    (CommitStateUnknownException, 500, UNKNOWN_STATE),
    (PydanticError, 400, "BadRequestException"),
    (errors.InvalidInputError, 400, "BadRequestException"),
    (errors.CommitOutcomeUnknownError, 500, UNKNOWN_STATE),
    (errors.NamespaceNotFoundError, 404, "NoSuchNamespaceException"),
    (errors.TableNotFoundError, 404, "NoSuchTableException"),
    (errors.NotFoundError, 404, "NoSuchWarehouseException"),
    (errors.TableHasAnotherNameError, 409, "AlreadyExistsException"),
    (errors.ConflictError, 409, "CommitFailedException"),
    (errors.LocationNotAllowedError, 403, "ForbiddenException"),
)


@dataclass(frozen=True, slots=True)
class JsonResponse:
    """A response with a JSON body."""

    #: The HTTP status.
    status: int
    #: The body, or its first part.
    body: bytes = b""
    #: The headers in addition to the defaults.
    headers: Mapping[str, str] = field(default_factory=dict)
    #: The error type, for the log; None for success.
    error: str | None = None
    #: The cause of the error, for the log only.
    detail: str | None = None
    #: The second part of the body. Several responses that clients have not read yet may share it in memory.
    shared: bytes = b""


class RejectedError(errors.TrinityLakeError):
    """A request is rejected with a status and an error type from the specification.

    Args:
        status: The HTTP status.
        kind: The error type.
        message: The message for the client.
        headers: Additional headers of the response.
        detail: The cause, for the log only.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        headers: Mapping[str, str] | None = None,
        detail: str | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.headers = dict(headers or {})
        self.detail = detail


def bad_request(message: str) -> RejectedError:
    """Return the error for an invalid request."""
    return RejectedError(400, "BadRequestException", message)


def forbidden(message: str) -> RejectedError:
    """Return the error for a request that the principal's rights or the warehouse do not allow."""
    return RejectedError(403, "ForbiddenException", message)


def unsupported(message: str) -> RejectedError:
    """Return the error for a part of the specification that this server does not support."""
    return RejectedError(406, "UnsupportedOperationException", message)


def too_many(message: str) -> RejectedError:
    """Return the error for a request that is rejected under load. Nothing was done, so it can be retried."""
    return RejectedError(503, UNAVAILABLE, message, headers={"Retry-After": "1"})


def ok(model: IcebergBaseModel | Mapping[str, Any], headers: Mapping[str, str] | None = None) -> JsonResponse:
    """Return a 200 response.

    Args:
        model: The body, as a model of pyiceberg or a JSON document.
        headers: Additional headers.
    """
    text = model.model_dump_json() if isinstance(model, IcebergBaseModel) else json.dumps(model)
    return JsonResponse(200, text.encode(), dict(headers or {}))


def encoded(model: IcebergBaseModel) -> bytes:
    """Return the JSON of a pyiceberg model."""
    return model.model_dump_json().encode()


def table_response(
    location: str | None,
    metadata: bytes,
    members: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> JsonResponse:
    """Return a 200 response with a table.

    Args:
        location: The URI of its metadata file, or None for a staged table.
        metadata: The end of the body with the table's metadata, from :func:`as_member`. It is by far the largest part,
            so it is encoded once and sent unchanged.
        members: Additional members of the body.
        headers: Additional headers.
    """
    first = {} if location is None else {"metadata-location": location}
    encoded = json.dumps({**first, **(members or {})})[:-1]
    body = f'{encoded}{"" if encoded == "{" else ", "}"metadata": '.encode()
    return JsonResponse(200, body, dict(headers or {}), shared=metadata)


def as_member(metadata: bytes) -> bytes:
    """Return encoded metadata as the last member of a response body."""
    return metadata + b"}"


NO_CONTENT = JsonResponse(204)


def failed(error: Exception, *, changes: bool, request_id: str) -> JsonResponse:
    """Return the response to a request that failed, and log unexpected errors.

    For a change, clients treat 500 as an unknown outcome. A storage error after which it is certain that nothing
    changed is therefore reported as 503. The response does not contain the text of unexpected errors.

    Args:
        error: The failure.
        changes: Whether the request may change something.
        request_id: The id of the request.
    """
    if isinstance(error, RejectedError):
        return _failure(error.status, error.kind, error.message, error.headers, error.detail)
    for kind, status, name in _STATUS:
        if isinstance(error, kind):
            reason = error.code if isinstance(error, errors.TrinityLakeError) else None
            return _failure(status, name, _message(error), reason=reason)
    if isinstance(error, errors.StorageError):
        if isinstance(error, errors.CorruptFileError) and not changes:
            return _failure(500, "InternalServerError", _message(error), reason=error.code)
        return _failure(503, UNAVAILABLE, _message(error), {"Retry-After": "1"}, reason=error.code)
    unforeseen = UNKNOWN_STATE if changes else "InternalServerError"
    logger.error("request %s failed", request_id, exc_info=error)
    text = f"internal error; find the cause in the server log by request id {request_id}"
    return _failure(500, unforeseen, text, detail=f"{type(error).__name__}: {error}")


def token_rejection() -> JsonResponse:
    """Return the response to a request for an OAuth token, in OAuth's error format."""
    text = "this server issues no tokens; configure the client with a token from its operator, for example token=..."
    body = json.dumps({"error": "unsupported_grant_type", "error_description": text}).encode()
    return JsonResponse(400, body, {"Cache-Control": "no-store"}, "unsupported_grant_type", text)


def late_error(*, changes: bool) -> RejectedError:
    """Return the error for a request that exceeded its time limit but continues. The outcome of a change is unknown."""
    return RejectedError(
        504,
        UNKNOWN_STATE if changes else UNAVAILABLE,
        "the request exceeded the time limit and continues in the background",
    )


def busy_error() -> RejectedError:
    """Return the error for a request that was rejected because too many requests are waiting. Nothing was done."""
    return too_many("too many requests are waiting; retry later")


def _message(error: Exception) -> str:
    if isinstance(error, PydanticError):
        faults = [
            f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
            for fault in error.errors(include_url=False, include_context=False, include_input=False)[:_SHOWN_FAULTS]
        ]
        return f"the request does not match the specification: {'; '.join(faults)}"
    return str(error) or type(error).__name__


def _failure(
    status: int,
    kind: str,
    message: str,
    headers: Mapping[str, str] | None = None,
    detail: str | None = None,
    *,
    reason: str | None = None,
) -> JsonResponse:
    """Return an error response of the specification. ``reason`` is the code of an error of this package."""
    short_message = message[:_MAX_MESSAGE_CHARS]
    error = {"message": short_message, "type": kind, "code": status} | ({} if reason is None else {"reason": reason})
    body = json.dumps({"error": error}).encode()
    return JsonResponse(status, body, dict(headers or {}), kind, detail or short_message)
