"""From the exceptions of obstore to typed errors (S7).

There are few classes of obstore's exceptions, and they do not tell enough. A 409 and a 412 are both AlreadyExistsError,
a missing bucket is a FileNotFoundError, and the answers to a list are all GenericError. The exceptions carry no status
and no body as data, but each ends with a dump of the Rust error. That holds both. This module reads the dump. The dump
also holds the address, the key and the raw answer with its quotes (key ids, signatures). So messages show only status,
code, the server's redacted message, and words of this module.
"""

from __future__ import annotations

import re

from obstore.exceptions import BaseError, UnauthenticatedError

from trinitylake_ops.errors import StorageError, TrinityLakeError
from trinitylake_ops.storage.s3.answers import (
    S3Request,
    TransportFailure,
    error_from_answer,
    error_from_transport,
    error_without_credentials,
)

#: Every exception that a request may end with.
OBSTORE_ERRORS = (BaseError, OSError, ValueError, NotImplementedError)

# These patterns match whole lines of the dump. A text of a server or a caller is quoted on one line there, with its
# line ends escaped. It is raw only before the dump, so the last match is the dump's own.
_ANSWER = re.compile(r'^ *inner: Status \{\n +status: (\d{3}),\n +body: (?:None|Some\(\n +"(.*)",\n)', re.MULTILINE)
_BARE_REDIRECT = re.compile(r"^ *inner: BareRedirect", re.MULTILINE)
_NO_ANSWER = re.compile(r"^ *(?:inner: Http\($|source: HttpError \{$)", re.MULTILINE)
_WHILE_CONNECTING = re.compile(r"^ *source: hyper_util::client::legacy::Error\(\n +Connect,$", re.MULTILINE)
_TIME_OUT = re.compile(r"^ *kind: Timeout,$", re.MULTILINE)
_TLS = re.compile(r"^ *error: (?:InvalidCertificate|InvalidMessage|AlertReceived|Peer\w+)|certificate", re.MULTILINE)
_SYSTEM_MESSAGE = re.compile(r'^ *message: "([^"\\]*)",$', re.MULTILINE)
_NO_HOST = re.compile(r'"dns error"')
_PROVIDER = "External AWS credential provider"

_CODE = re.compile(r"<Code>\s*([A-Za-z0-9._-]+)\s*</Code>")
_MESSAGE = re.compile(r"<Message>(.*?)</Message>", re.DOTALL)


def status_and_code(error: BaseException) -> tuple[int | None, str | None]:
    """Return HTTP status and S3 error code of the answer behind an exception of obstore, if there are any."""
    text = str(error)
    answers = _ANSWER.findall(text)
    if answers:
        status, body = answers[-1]
        code = _CODE.search(body)
        return int(status), code.group(1) if code else None
    # obstore drops the status of a redirect that names no other place.
    return (301, None) if _BARE_REDIRECT.search(text) else (None, None)


def typed_error(request: S3Request, error: BaseException, endpoint: str) -> TrinityLakeError:
    """Return the typed error for the end of a request, one of ``OBSTORE_ERRORS``."""
    text = str(error)
    status, code = status_and_code(error)
    if status is not None:
        return error_from_answer(request, status, code, server_message(text))
    if isinstance(error, UnauthenticatedError) and _PROVIDER in text:
        return error_without_credentials(request, "AWS's environment gives no valid credentials")
    if has_no_answer(text):
        return error_from_transport(request, transport_failure(text), endpoint, reason(text))
    if request.operation.changes_files:
        # The server may have done its work, though obstore cannot read the answer.
        return error_from_transport(request, TransportFailure.NO_ANSWER, endpoint, "an answer that cannot be read")
    return StorageError(
        f"{request.failure}: obstore cannot read the server's answer; try the option 'client' = 's3fs', "
        "and check the option 'endpoint'",
        path=request.path,
    )


def has_no_answer(text: str) -> bool:
    """Whether an exception's text says that no whole answer came."""
    return _NO_ANSWER.search(text) is not None


def server_message(text: str) -> str | None:
    """Return what the server says in its answer, if there is one."""
    found = _MESSAGE.search(_ANSWER.findall(text)[-1][1]) if _ANSWER.search(text) else None
    return found.group(1).replace("\\n", " ").replace('\\"', '"') if found else None


def transport_failure(text: str) -> TransportFailure:
    """Return how far a request without an answer got."""
    if not _WHILE_CONNECTING.search(text):
        return TransportFailure.NO_ANSWER
    return TransportFailure.NOT_TRUSTED if _TLS.search(text) else TransportFailure.NOT_CONNECTED


def reason(text: str) -> str:
    """Return why there is no answer."""
    if _TIME_OUT.search(text):
        return "time-out while connecting" if _WHILE_CONNECTING.search(text) else "time-out"
    if _NO_HOST.search(text):
        return "unknown host"
    message = _SYSTEM_MESSAGE.search(text)
    if message:
        return message.group(1)
    return "no connection" if _WHILE_CONNECTING.search(text) else "the connection broke"
