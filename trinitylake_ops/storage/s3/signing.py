"""Sign individual S3 requests for clients without credentials. Each request is validated before it is signed.

A signature covers the method, host, path and query, and the headers that it lists. Some servers also obey headers that
are not covered, for example the header with the source of a copy. Writes are therefore also restricted by the
credentials that sign them (decision 37).
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qsl, unquote_to_bytes, urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from trinitylake_ops.errors import InvalidInputError, InvalidLocationError, LocationNotAllowedError
from trinitylake_ops.storage.paths import check_path
from trinitylake_ops.storage.s3.s3fs_client import BucketAddress
from trinitylake_ops.storage.s3.settings import S3Location

_URI = re.compile(r"[\x21-\x7e]+")
#: Without "+", which some servers decode as a space, and without ";", which separates the fields of a query on some
#: servers, and after which some servers drop the rest of a path segment.
_PATH = re.compile(r"/[A-Za-z0-9._~!&'()*,=:@%/$-]*")
_QUERY = re.compile(r"[A-Za-z0-9._~!'()*,=:@%/?$&-]*")
_MAX_URI_CHARS = 8_192
_MAX_HEADERS = 64
_NOT_PRINTABLE = re.compile(r"[^\x20-\x7e]")
_HASH = re.compile(r"[0-9a-f]{64}|UNSIGNED-PAYLOAD|STREAMING-UNSIGNED-PAYLOAD-TRAILER")
_CONTENT_HASH = "x-amz-content-sha256"
#: Requests that are signed, by method and query parameters. The parameter ``x-id``, which has no effect, is ignored.
_READS = frozenset({("GET", frozenset[str]()), ("HEAD", frozenset[str]())})
_WRITES = frozenset(
    {
        ("PUT", frozenset[str]()),
        ("PUT", frozenset({"partNumber", "uploadId"})),
        ("POST", frozenset({"uploads"})),
        ("POST", frozenset({"uploadId"})),
        ("DELETE", frozenset({"uploadId"})),
    }
)
_LIST = frozenset(
    {
        "list-type", "prefix", "delimiter", "max-keys", "continuation-token", "start-after", "encoding-type",
        "fetch-owner",
    }
)  # fmt: skip
#: Writes that create an object. They are signed with ``If-None-Match: *``, so that they never overwrite a file.
_CREATES = frozenset({("PUT", frozenset[str]()), ("POST", frozenset({"uploadId"}))})
#: Allowed headers. They describe the body, the range or condition of a read, and the client.
_KNOWN_HEADERS = re.compile(
    r"host|accept|accept-encoding|authorization|connection|content-encoding|content-length|content-md5|content-type"
    r"|expect|if-match|if-modified-since|if-none-match|if-unmodified-since|range|transfer-encoding|user-agent"
    r"|amz-sdk-[a-z-]+|x-amzn-trace-id"
    r"|x-amz-(?:date|content-sha256|decoded-content-length|trailer|te|user-agent|security-token|sdk-[a-z0-9-]+"
    r"|checksum-[a-z0-9-]+)"
)
_REPLACED = frozenset({"authorization", "x-amz-date", "x-amz-security-token", _CONTENT_HASH})
_OTHER_SIGNED_HEADERS = frozenset({"host", "content-md5", "content-type", "if-none-match"})
_DEFAULT_PORTS = {"http": 80, "https": 443}

_INVALID_URI = "cannot sign the request: its URI is invalid"
_OUTSIDE_TABLE = "cannot sign the request: it is not for a file of the table"


@dataclass(frozen=True, slots=True)
class UnsignedRequest:
    """A request that a client wants to send to S3."""

    method: str
    uri: str
    region: str
    #: Values by lower-case name.
    headers: Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class SignedRequest:
    """A request with the headers that contain its signature."""

    uri: str
    headers: Mapping[str, Sequence[str]]


def check_request(
    request: UnsignedRequest,
    folder: S3Location,
    address: BucketAddress,
    *,
    may_write: bool,
    reached: Container[str] | None = None,
) -> bool:
    """Check that a request only lists the table's files, or reads or writes one file below a folder.

    Args:
        request: The request to sign.
        folder: Folder of the table.
        address: Address of the bucket.
        may_write: Whether files may be written.
        reached: URIs of the files that may be read. None allows all files in the folder.

    Returns:
        Whether the request writes a file.

    Raises:
        InvalidInputError: The request is not a request to this server and bucket.
        LocationNotAllowedError: The request is not allowed.
    """
    if len(request.uri) > _MAX_URI_CHARS or len(request.headers) > _MAX_HEADERS:
        raise InvalidInputError("cannot sign the request: it is too long")
    if not _URI.fullmatch(request.uri):
        raise InvalidInputError(_INVALID_URI)
    if request.region != address.region:
        raise InvalidInputError(f"cannot sign the request: its region must be {address.region}")
    try:
        split = urlsplit(request.uri)
    except ValueError as error:
        raise InvalidInputError(f"{_INVALID_URI}: {error}") from None
    _check_headers(request, split)
    key, query = _key(split, folder, address), _query(split)
    if request.method == "GET" and not key and "list-type" in query and reached is None:
        _check_list(query, folder)
        return False
    try:
        check_path(key)
    except InvalidLocationError:
        key = ""
    if ";" in key:  # a proxy may decode the path, and the server behind it may drop the rest of each segment
        raise LocationNotAllowedError("cannot sign the request: the name of the file contains ';'; choose another name")
    if not key.startswith(folder.key_prefix) or key == folder.key_prefix:
        raise LocationNotAllowedError(_OUTSIDE_TABLE)
    if reached is not None and f"s3://{folder.bucket}/{key}" not in reached:
        raise LocationNotAllowedError("cannot sign the request: this version of the table does not refer to the file")
    return _check_kind(request.method, frozenset(query) - {"x-id"}, key.removeprefix(folder.key_prefix), may_write)


def _check_kind(method: str, parameters: frozenset[str], path: str, may_write: bool) -> bool:
    """Return whether a request writes a file. Raise LocationNotAllowedError if it is not allowed."""
    if (method, parameters) in _READS:
        return False
    if (method, parameters) not in _WRITES:
        raise LocationNotAllowedError("cannot sign the request: only reads and writes of files are signed")
    is_writable = path.startswith(("data/", "metadata/")) and not path.endswith((".metadata.json", ".metadata.json.gz"))
    if not may_write or not is_writable:
        raise LocationNotAllowedError(
            "cannot sign the request: writes require the right to write, a role of the server, and a file below data/"
            " or metadata/ that is not a metadata file"
        )
    return True


def _check_headers(request: UnsignedRequest, split: SplitResult) -> None:
    """Reject headers that are not allowed, because servers may obey headers that the signature does not cover."""
    for name, values in request.headers.items():
        if _NOT_PRINTABLE.search(name) or any(_NOT_PRINTABLE.search(value) for value in values):
            raise InvalidInputError("cannot sign the request: a header contains characters that are not printable")
        if not _KNOWN_HEADERS.fullmatch(name):
            raise LocationNotAllowedError(f"cannot sign the request: the header {name[:60]!r} is not allowed")
    hosts = request.headers.get("host")
    if hosts is not None and [host.lower() for host in hosts] not in ([split.netloc.lower()], [_host(split)]):
        raise InvalidInputError("cannot sign the request: its Host header differs from the host of its URI; omit it")


def _host(split: SplitResult) -> str:
    """Return the ``Host`` header of a URI, without a default port."""
    try:
        host, port = split.hostname or "", split.port
    except ValueError:
        raise InvalidInputError(_INVALID_URI) from None
    host = f"[{host}]" if ":" in host else host
    return host if port in (None, _DEFAULT_PORTS.get(split.scheme)) else f"{host}:{port}"


def _key(split: SplitResult, folder: S3Location, address: BucketAddress) -> str:
    """Return the key in a URI. It is empty if the URI is that of the bucket."""
    endpoint = urlsplit(address.endpoint)
    hosts = {endpoint.netloc: f"{endpoint.path}/{folder.bucket}", f"{folder.bucket}.{endpoint.netloc}": endpoint.path}
    start = hosts.get(split.netloc)
    if split.scheme != endpoint.scheme or start is None or split.fragment or not _PATH.fullmatch(split.path or "/"):
        raise InvalidInputError("cannot sign the request: its URI does not match the server and the bucket")
    try:
        path = unquote_to_bytes(split.path or "/").decode()
    except UnicodeDecodeError:
        raise InvalidInputError("cannot sign the request: its URI is not valid UTF-8") from None
    if path in (start, f"{start}/"):
        return ""
    if not path.startswith(f"{start}/"):
        raise LocationNotAllowedError(_OUTSIDE_TABLE)
    return path.removeprefix(f"{start}/")


def _query(split: SplitResult) -> dict[str, str]:
    if not _QUERY.fullmatch(split.query):
        raise InvalidInputError("cannot sign the request: the query of its URI is invalid")
    fields = parse_qsl(split.query, keep_blank_values=True, max_num_fields=20)
    if len(dict(fields)) < len(fields):
        raise InvalidInputError("cannot sign the request: duplicate query parameter in its URI")
    return dict(fields)


def _check_list(query: Mapping[str, str], folder: S3Location) -> None:
    is_known = frozenset(query) - {"x-id"} <= _LIST and query["list-type"] == "2"
    if not is_known or not query.get("prefix", "").startswith(folder.key_prefix):
        raise LocationNotAllowedError("cannot sign the request: only files of the table can be listed")


def signed(request: UnsignedRequest, region: str, keys: Credentials) -> SignedRequest:
    """Sign a request.

    A request that creates an object is signed with ``If-None-Match: *``, so that it fails on a storage with conditional
    writes if the object exists. The client must send this header, because the signature covers it.

    Args:
        request: The request to sign, which :func:`check_request` accepted.
        region: Region of the bucket.
        keys: Credentials to sign with.
    """
    headers = {name: ", ".join(values) for name, values in request.headers.items() if name not in _REPLACED}
    split = urlsplit(request.uri)
    if "host" in headers:
        headers["host"] = _host(split)
    if (request.method, frozenset(_query(split)) - {"x-id"}) in _CREATES:
        headers["if-none-match"] = "*"
    content_hash = ", ".join(request.headers.get(_CONTENT_HASH, ()))
    aws_request = AWSRequest(request.method, request.uri, headers=headers)
    _Signer(keys, region, content_hash if _HASH.fullmatch(content_hash) else "UNSIGNED-PAYLOAD").add_auth(aws_request)
    return SignedRequest(request.uri, {name: [value] for name, value in aws_request.headers.items()})


class _Signer(S3SigV4Auth):  # type: ignore[misc]
    """Signs the headers that S3 requires. The body is not available, because the client sends it directly to S3."""

    def __init__(self, keys: Credentials, region: str, content_hash: str):
        super().__init__(keys, "s3", region)
        self._content_hash = content_hash

    def payload(self, request: AWSRequest) -> str:
        return self._content_hash

    def headers_to_sign(self, request: AWSRequest) -> object:
        headers = super().headers_to_sign(request)
        for name in {name for name, _ in headers.items()}:
            if name.lower() not in _OTHER_SIGNED_HEADERS and not name.lower().startswith("x-amz-"):
                del headers[name]
        return headers
