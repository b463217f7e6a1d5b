"""Extract the response's status, error code and message from obstore's exceptions.

The classes of obstore's exceptions are too coarse: status 409 and 412 are both AlreadyExistsError, a missing bucket is
a FileNotFoundError, and all failures of a listing are GenericError. The exceptions have no attributes for status and
body, but their text ends with a debug dump of the Rust error, which contains both. The dump also contains the URL, the
key and the raw response, which may repeat key IDs and signatures. Messages therefore show only the status, the code,
the server's redacted message, and texts of this module.
"""

from __future__ import annotations

import re

from obstore.exceptions import BaseError

from trinitylake_ops.storage.http.requests import TransportFailure

#: All exceptions that a request may raise.
OBSTORE_ERRORS = (BaseError, OSError, ValueError, NotImplementedError)

# These patterns match whole lines of the dump, where texts of the server and the caller are quoted on one line, with
# escaped line breaks. Before the dump, these texts are not escaped, so only the last match is trusted.
_RESPONSE = re.compile(r'^ *inner: Status \{\n +status: (\d{3}),\n +body: (?:None|Some\(\n +"(.*)",\n)', re.MULTILINE)
_BARE_REDIRECT = re.compile(r"^ *inner: BareRedirect", re.MULTILINE)
_NO_RESPONSE = re.compile(r"^ *(?:inner: Http\($|source: HttpError \{$)", re.MULTILINE)
_WHILE_CONNECTING = re.compile(r"^ *source: hyper_util::client::legacy::Error\(\n +Connect,$", re.MULTILINE)
_TIME_OUT = re.compile(r"^ *kind: Timeout,$", re.MULTILINE)
_TLS = re.compile(r"^ *error: (?:InvalidCertificate|InvalidMessage|AlertReceived|Peer\w+)|certificate", re.MULTILINE)
_SYSTEM_MESSAGE = re.compile(r'^ *message: "([^"\\]*)",$', re.MULTILINE)
_NO_HOST = re.compile(r'"dns error"')
_CODE = re.compile(r"<Code>\s*([A-Za-z0-9._-]+)\s*</Code>")
_MESSAGE = re.compile(r"<Message>(.*?)</Message>", re.DOTALL)


def status_and_code(error: BaseException) -> tuple[int | None, str | None]:
    """Return the HTTP status and the error code of the response that caused an exception, if there are any."""
    text = str(error)
    responses = _RESPONSE.findall(text)
    if responses:
        status, body = responses[-1]
        code = _CODE.search(body)
        return int(status), code.group(1) if code else None
    # obstore drops the status of a redirect without a Location header.
    return (301, None) if _BARE_REDIRECT.search(text) else (None, None)


def server_message(error: BaseException) -> str | None:
    """Return the server's message from the response that caused an exception, if there is one."""
    responses = _RESPONSE.findall(str(error))
    message = _MESSAGE.search(responses[-1][1]) if responses else None
    return message.group(1).replace("\\n", " ").replace('\\"', '"') if message else None


def is_response_missing(error: BaseException) -> bool:
    """Whether a request ended without a complete response."""
    return isinstance(error, TimeoutError) or _NO_RESPONSE.search(str(error)) is not None


def transport_failure(error: BaseException) -> TransportFailure:
    """Return the kind of failure of a request without a response."""
    text = str(error)
    if not _WHILE_CONNECTING.search(text):
        return TransportFailure.NO_RESPONSE
    return TransportFailure.NOT_TRUSTED if _TLS.search(text) else TransportFailure.NOT_CONNECTED


def reason(error: BaseException) -> str:
    """Return why there is no response, for messages."""
    text = str(error)
    if isinstance(error, TimeoutError):
        return "timeout"
    if _TIME_OUT.search(text):
        return "timeout while connecting" if _WHILE_CONNECTING.search(text) else "timeout"
    if _NO_HOST.search(text):
        return "unknown host"
    message = _SYSTEM_MESSAGE.search(text)
    if message:
        return message.group(1)
    return "no connection" if _WHILE_CONNECTING.search(text) else "the connection was lost"
