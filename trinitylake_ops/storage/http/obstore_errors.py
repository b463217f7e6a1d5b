"""What the exceptions of obstore say, by the dump of the Rust error that each ends with.

There are few classes of obstore's exceptions, and they do not tell enough. A 409 and a 412 are both AlreadyExistsError,
a missing bucket is a FileNotFoundError, and the answers to a list are all GenericError. The exceptions carry no status
and no body as data, but each ends with a dump of the Rust error. That holds both. This module reads the dump. The dump
also holds the address, the key and the raw answer with its quotes (key ids, signatures). So messages show only status,
code, the server's redacted message, and words of this module.
"""

from __future__ import annotations

import re

from obstore.exceptions import BaseError

from trinitylake_ops.storage.http.requests import TransportFailure

#: Every exception that a request may end with.
OBSTORE_ERRORS = (BaseError, OSError, ValueError, NotImplementedError)

# These patterns match whole lines of the dump. A text of a server or a caller is quoted on one line there, with its
# line ends escaped. It is raw only before the dump, so the last match is the dump's own.
_ANSWER = re.compile(r'^ *inner: Status \{\n +status: (\d{3}),\n +body: (?:None|Some\(\n +"(.*)",\n)', re.MULTILINE)
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
    """Return HTTP status and the server's own code of the answer behind an exception of obstore, if there are any."""
    text = str(error)
    responses = _ANSWER.findall(text)
    if responses:
        status, body = responses[-1]
        code = _CODE.search(body)
        return int(status), code.group(1) if code else None
    # obstore drops the status of a redirect that names no other place.
    return (301, None) if _BARE_REDIRECT.search(text) else (None, None)


def server_message(error: BaseException) -> str | None:
    """Return what the server says in its answer, if there is one."""
    responses = _ANSWER.findall(str(error))
    found = _MESSAGE.search(responses[-1][1]) if responses else None
    return found.group(1).replace("\\n", " ").replace('\\"', '"') if found else None


def is_response_missing(error: BaseException) -> bool:
    """Whether an exception says that no whole answer came."""
    return isinstance(error, TimeoutError) or _NO_RESPONSE.search(str(error)) is not None


def transport_failure(error: BaseException) -> TransportFailure:
    """Return how far a request without an answer got."""
    text = str(error)
    if not _WHILE_CONNECTING.search(text):
        return TransportFailure.NO_ANSWER
    return TransportFailure.NOT_TRUSTED if _TLS.search(text) else TransportFailure.NOT_CONNECTED


def reason(error: BaseException) -> str:
    """Return why there is no answer."""
    text = str(error)
    if isinstance(error, TimeoutError):
        return "time-out"
    if _TIME_OUT.search(text):
        return "time-out while connecting" if _WHILE_CONNECTING.search(text) else "time-out"
    if _NO_HOST.search(text):
        return "unknown host"
    message = _SYSTEM_MESSAGE.search(text)
    if message:
        return message.group(1)
    return "no connection" if _WHILE_CONNECTING.search(text) else "the connection broke"
