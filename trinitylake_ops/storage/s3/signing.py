"""Signatures of single requests to S3 for others, who have no keys. Each is checked before it is signed.

A signature covers method, host, path and query, and the headers that it names. Some servers also obey headers that it
does not name, such as the source of a copy. So what a request writes is bounded by its credentials (decision 37).
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
#: No "+", which some servers take for a space. No ";": some servers drop it with the rest of the segment of a path, and
#: it separates the fields of a query for some.
_PATH = re.compile(r"/[A-Za-z0-9._~!&'()*,=:@%/$-]*")
_QUERY = re.compile(r"[A-Za-z0-9._~!'()*,=:@%/?$&-]*")
_LONGEST_URI_CHARS = 8_192
_MOST_HEADERS = 64
_NO_TEXT = re.compile(r"[^\x20-\x7e]")
_HASH = re.compile(r"[0-9a-f]{64}|UNSIGNED-PAYLOAD|STREAMING-UNSIGNED-PAYLOAD-TRAILER")
_CONTENT_HASH = "x-amz-content-sha256"
#: What is signed: methods, each with all that the query asks for beside the file. ``x-id`` only names the request.
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
#: Writes that put an object at its key. They are signed to create it only, so that no existing file is overwritten.
_CREATES = frozenset({("PUT", frozenset[str]()), ("POST", frozenset({"uploadId"}))})
#: The only headers of a request that is signed. They describe the body, a range or condition of a read, and the client.
_KNOWN_HEADERS = re.compile(
    r"host|accept|accept-encoding|authorization|connection|content-encoding|content-length|content-md5|content-type"
    r"|expect|if-match|if-modified-since|if-none-match|if-unmodified-since|range|transfer-encoding|user-agent"
    r"|amz-sdk-[a-z-]+|x-amzn-trace-id"
    r"|x-amz-(?:date|content-sha256|decoded-content-length|trailer|te|user-agent|security-token|sdk-[a-z0-9-]+"
    r"|checksum-[a-z0-9-]+)"
)
_REPLACED = frozenset({"authorization", "x-amz-date", "x-amz-security-token", _CONTENT_HASH})
_ALSO_SIGNED = frozenset({"host", "content-md5", "content-type", "if-none-match"})
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class UnsignedRequest:
    """A request that a client would send to S3. Names of headers are in lower case."""

    method: str
    uri: str
    region: str
    headers: Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class SignedRequest:
    """The same request with the headers that sign it."""

    uri: str
    headers: Mapping[str, Sequence[str]]


def check_request(
    request: UnsignedRequest,
    folder: S3Location,
    place: BucketAddress,
    *,
    may_write: bool,
    reached: Container[str] | None = None,
) -> bool:
    """Check that a request does no more than read or write one file below a folder. Returns whether it writes.

    Args:
        request: The request to sign.
        folder: The folder of the table.
        place: How the bucket is reached.
        may_write: Whether files may be written.
        reached: The URIs of the only files that may be read, None for all files of the folder.

    Raises:
        InvalidInputError: If it is no request to this S3.
        LocationNotAllowedError: If it is not signed for the client.
    """
    if len(request.uri) > _LONGEST_URI_CHARS or len(request.headers) > _MOST_HEADERS:
        raise InvalidInputError("the request to sign is too long")
    if not _URI.fullmatch(request.uri):
        raise InvalidInputError("the URI of the request to sign is not written as one")
    if request.region != place.region:
        raise InvalidInputError(f"the region is {place.region}, and requests for others are not signed")
    try:
        split = urlsplit(request.uri)
    except ValueError as error:
        raise InvalidInputError(f"the URI of the request to sign is not written as one: {error}") from None
    _check_headers(request, split)
    key, query = _key(split, folder, place), _query(split)
    if request.method == "GET" and not key and "list-type" in query and reached is None:
        _check_list(query, folder)
        return False
    try:
        check_path(key)
    except InvalidLocationError:
        key = ""
    if ";" in key:  # a proxy may decode the path, and the server behind it drop the rest of each segment
        raise LocationNotAllowedError("requests for files with ';' in their names are not signed; choose another name")
    if not key.startswith(folder.key_prefix) or key == folder.key_prefix:
        raise LocationNotAllowedError("only requests for files of the table are signed")
    if reached is not None and f"s3://{folder.bucket}/{key}" not in reached:
        raise LocationNotAllowedError("only reads of files that this version of the table names are signed")
    return _check_kind(request.method, frozenset(query) - {"x-id"}, key.removeprefix(folder.key_prefix), may_write)


def _check_kind(method: str, asked: frozenset[str], path: str, may_write: bool) -> bool:
    if (method, asked) in _READS:
        return False
    if (method, asked) not in _WRITES:
        raise LocationNotAllowedError(
            "this is not signed: files are read and written, and nothing else is done to them"
        )
    is_own = path.startswith(("data/", "metadata/")) and not path.endswith((".metadata.json", ".metadata.json.gz"))
    if not may_write or not is_own:
        raise LocationNotAllowedError(
            "this is not signed: who may write, writes below data/ and metadata/, but no metadata file,"
            " if the server has a role"
        )
    return True


def _check_headers(request: UnsignedRequest, split: SplitResult) -> None:
    """Check the headers of a request, because the signature covers some of them and servers may obey the others.

    Args:
        request: The request to sign.
        split: Its URI. A ``Host`` header must name the URI's own host.

    Raises:
        InvalidInputError: For a header that is no plain text, or for another host.
        LocationNotAllowedError: For a header that is not on the list.
    """
    for name, values in request.headers.items():
        if _NO_TEXT.search(name) or any(_NO_TEXT.search(value) for value in values):
            raise InvalidInputError("a header of the request to sign is no plain text")
        if not _KNOWN_HEADERS.fullmatch(name):
            raise LocationNotAllowedError(
                f"requests with the header {name[:60]!r} are not signed: it is not on the list of allowed headers"
            )
    hosts = request.headers.get("host")
    if hosts is not None and [host.lower() for host in hosts] not in ([split.netloc.lower()], [_host(split)]):
        raise InvalidInputError("the Host header of the request to sign differs from the host of its URI; leave it out")


def _host(split: SplitResult) -> str:
    """Return the value of the ``Host`` header for a URI, without the default port of its scheme."""
    try:
        host, port = split.hostname or "", split.port
    except ValueError:
        raise InvalidInputError("the URI of the request to sign is not written as one") from None
    host = f"[{host}]" if ":" in host else host
    return host if port in (None, _DEFAULT_PORTS.get(split.scheme)) else f"{host}:{port}"


def _key(split: SplitResult, folder: S3Location, place: BucketAddress) -> str:
    """Return the key of the file that a URI names, empty for the bucket itself."""
    endpoint = urlsplit(place.endpoint)
    hosts = {endpoint.netloc: f"{endpoint.path}/{folder.bucket}", f"{folder.bucket}.{endpoint.netloc}": endpoint.path}
    start = hosts.get(split.netloc)
    if split.scheme != endpoint.scheme or start is None or split.fragment or not _PATH.fullmatch(split.path or "/"):
        raise InvalidInputError("the URI is not one of this bucket, as this server reaches it")
    try:
        path = unquote_to_bytes(split.path or "/").decode()
    except UnicodeDecodeError:
        raise InvalidInputError("the URI is no UTF-8") from None
    if path in (start, f"{start}/"):
        return ""
    if not path.startswith(f"{start}/"):
        raise LocationNotAllowedError("only requests for files of the table are signed")
    return path.removeprefix(f"{start}/")


def _query(split: SplitResult) -> dict[str, str]:
    if not _QUERY.fullmatch(split.query):
        raise InvalidInputError("the query of the URI cannot be read")
    fields = parse_qsl(split.query, keep_blank_values=True, max_num_fields=20)
    if len(dict(fields)) < len(fields):
        raise InvalidInputError("the query of the URI says something twice")
    return dict(fields)


def _check_list(query: Mapping[str, str], folder: S3Location) -> None:
    asked = query.get("prefix", "")
    if not frozenset(query) - {"x-id"} <= _LIST or query["list-type"] != "2" or not asked.startswith(folder.key_prefix):
        raise LocationNotAllowedError("only lists of the table's own files are signed")


def signed(request: UnsignedRequest, region: str, keys: Credentials) -> SignedRequest:
    """Return a request with its signature.

    A request that puts an object at its key is signed with ``If-None-Match: *``, so that it fails on a storage with
    conditional writes if the object exists. The client must send that header, because the signature covers it.

    Args:
        request: The request to sign, which :func:`check_request` accepted.
        region: The region of the bucket.
        keys: The credentials to sign with.
    """
    kept = {name: ", ".join(values) for name, values in request.headers.items() if name not in _REPLACED}
    split = urlsplit(request.uri)
    if "host" in kept:
        kept["host"] = _host(split)
    if (request.method, frozenset(_query(split)) - {"x-id"}) in _CREATES:
        kept["if-none-match"] = "*"
    content_hash = ", ".join(request.headers.get(_CONTENT_HASH, ()))
    made = AWSRequest(request.method, request.uri, headers=kept)
    _Signer(keys, region, content_hash if _HASH.fullmatch(content_hash) else "UNSIGNED-PAYLOAD").add_auth(made)
    headers = {name: [value] for name, value in made.headers.items()}
    return SignedRequest(request.uri, headers)


class _Signer(S3SigV4Auth):  # type: ignore[misc]
    """Signs what S3 needs to be signed. The body is the client's, and was not sent here."""

    def __init__(self, keys: Credentials, region: str, content_hash: str):
        super().__init__(keys, "s3", region)
        self._content_hash = content_hash

    def payload(self, request: AWSRequest) -> str:
        return self._content_hash

    def headers_to_sign(self, request: AWSRequest) -> object:
        found = super().headers_to_sign(request)
        for name in {name for name, _ in found.items()}:
            if name.lower() not in _ALSO_SIGNED and not name.lower().startswith("x-amz-"):
                del found[name]
        return found
