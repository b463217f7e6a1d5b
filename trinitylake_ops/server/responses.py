"""Answers, and the status and type that Iceberg's specification has for each failure."""

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
_LONGEST_MESSAGE_CHARS = 2_000
_SHOWN_FAULTS = 3

#: The first that fits counts, so that a subclass stands before its base.
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
    """An answer to a request: status, body of JSON, further headers. ``error`` is its type, for the log."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    error: str | None = None
    detail: str | None = None
    #: The rest of the body. Several answers that clients have not read may share it.
    shared: bytes = b""


class RejectedError(errors.TrinityLakeError):
    """A request is refused with a status and a type of the specification. ``detail`` is for the log alone."""

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
    """Return the error for a request that makes no sense."""
    return RejectedError(400, "BadRequestException", message)


def forbidden(message: str) -> RejectedError:
    """Return the error for what a principal, or a warehouse, does not allow."""
    return RejectedError(403, "ForbiddenException", message)


def unsupported(message: str) -> RejectedError:
    """Return the error for what the specification has, and this server does not."""
    return RejectedError(406, "UnsupportedOperationException", message)


def too_many(message: str) -> RejectedError:
    """Return the error for a request that comes while there are too many others. Nothing was done."""
    return RejectedError(503, UNAVAILABLE, message, headers={"Retry-After": "1"})


def ok(model: IcebergBaseModel | Mapping[str, Any], headers: Mapping[str, str] | None = None) -> JsonResponse:
    """Return the answer 200 with a model of pyiceberg, or a document."""
    text = model.model_dump_json() if isinstance(model, IcebergBaseModel) else json.dumps(model)
    return JsonResponse(200, text.encode(), dict(headers or {}))


def encoded(model: IcebergBaseModel) -> bytes:
    """Return the JSON of a model of pyiceberg."""
    return model.model_dump_json().encode()


def table_response(
    location: str | None,
    metadata: bytes,
    given: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> JsonResponse:
    """Return the answer 200 with a table: the URI of its metadata file, the metadata, further members.

    ``metadata`` is the member's JSON and the end of the body, as :func:`as_member` returns it. It is sent as it is. It
    is by far the largest part, and was encoded before.
    """
    members = {"metadata-location": location} if location is not None else {}
    rest = json.dumps({**members, **(given or {})})[:-1]
    body = f'{rest}{"" if rest == "{" else ", "}"metadata": '.encode()
    return JsonResponse(200, body, dict(headers or {}), shared=metadata)


def as_member(metadata: bytes) -> bytes:
    """Return the JSON of metadata as the last member of the body of an answer."""
    return metadata + b"}"


NO_CONTENT = JsonResponse(204)


def failed(error: Exception, *, changes: bool, request_id: str) -> JsonResponse:
    """Return the answer to a request that failed.

    ``changes`` says that the request would change something. Then 500 tells clients that nobody knows the outcome. So a
    failure of the storage is 503, since it certainly changed nothing. What is unforeseen is not told to clients.
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
    text = f"the server failed; its log says why, by the request id {request_id}"
    return _failure(500, unforeseen, text, detail=f"{type(error).__name__}: {error}")


def token_rejection() -> JsonResponse:
    """Return the answer to a client that asks for a token by a name and a secret. It is an error as OAuth has it."""
    text = "this server gives no tokens; give the client one that its operator made, such as token=..."
    body = json.dumps({"error": "unsupported_grant_type", "error_description": text}).encode()
    return JsonResponse(400, body, {"Cache-Control": "no-store"}, "unsupported_grant_type", text)


def late_error(*, changes: bool) -> RejectedError:
    """Return the error for a request that runs for too long. It goes on, so that the outcome of a change is unknown."""
    return RejectedError(504, UNKNOWN_STATE if changes else UNAVAILABLE, "the request took too long, and continues")


def busy_error() -> RejectedError:
    """Return the error for a request that did not begin because too many others wait. Nothing was done."""
    return too_many("too many requests wait already; retry later")


def _message(error: Exception) -> str:
    if isinstance(error, PydanticError):
        shown = [
            f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
            for fault in error.errors(include_url=False, include_context=False, include_input=False)[:_SHOWN_FAULTS]
        ]
        return f"the request is not as the specification has it: {'; '.join(shown)}"
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
    """Return an error of the specification. ``reason`` is the code of an error of this package."""
    shown = message[:_LONGEST_MESSAGE_CHARS]
    error = {"message": shown, "type": kind, "code": status} | ({} if reason is None else {"reason": reason})
    return JsonResponse(status, json.dumps({"error": error}).encode(), dict(headers or {}), kind, detail or shown)
