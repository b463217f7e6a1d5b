"""The client for Azure's Blob service: requests, pages of listings, and typed errors for client exceptions.

adlfs, which wraps the same client, is not used: its operations send several requests, it uploads large files as lists
of blocks, and its destructor fails in a forked child.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, unquote
from xml.etree import ElementTree as ET

import aiohttp
from azure.core.credentials import AzureSasCredential
from azure.core.exceptions import AzureError, ClientAuthenticationError, HttpResponseError
from azure.core.pipeline.transport import AioHttpTransport, HttpRequest
from azure.identity import CredentialUnavailableError
from azure.identity.aio import DefaultAzureCredential
from azure.storage.blob.aio import BlobServiceClient

from trinitylake_ops.errors import StorageError, TrinityLakeError
from trinitylake_ops.storage.azure.errors import error_from_response, error_without_credentials
from trinitylake_ops.storage.azure.settings import Account, AzureSettings
from trinitylake_ops.storage.background import at_fork, leak
from trinitylake_ops.storage.http.clients import close_on_loop, run_on_loop
from trinitylake_ops.storage.http.requests import StorageRequest, aiohttp_failure, error_from_transport
from trinitylake_ops.storage.http.settings import max_seconds

T = TypeVar("T")

#: Larger bodies are sent in chunks.
_MAX_UNCHUNKED_BYTES = 1 << 18


class _SingleRequestTransport(AioHttpTransport):  # type: ignore[misc] # azure-core hides its type behind a __getattr__
    """The transport of azure-core without the retries of aiohttp.

    aiohttp silently resends a PUT or DELETE whose connection was lost before the response. A resent create would find
    the file of the first send and report that another writer created it. A wire test checks that the attribute works.
    """

    async def open(self) -> None:
        await super().open()
        assert self.session is not None
        self.session._retry_connection = False


class BlobResponse(NamedTuple):
    """A response before its body is read."""

    status: int
    #: Headers by case-insensitive name.
    headers: Mapping[str, str]
    response: Any  # an aiohttp response

    @property
    def error_code(self) -> str | None:
        """The service's error code."""
        return self.headers.get("x-ms-error-code")


@dataclass(frozen=True, slots=True)
class _OpenClient:
    service: BlobServiceClient
    credential: DefaultAzureCredential | None


class BlobClient:
    """A client for one container that can be used from any thread and in forked children.

    An event loop does not survive a fork, so a forked child creates a separate client for its first request. The client
    is closed when this object is garbage-collected.
    """

    def __init__(self, container: str, account: Account, settings: AzureSettings):
        self._container_url = f"{account.endpoint}/{container}"
        self._container = container
        self._account = account
        self._settings = settings
        self._lock = threading.Lock()
        self._opened: list[_OpenClient] = []  # the client of this process, created on first use
        weakref.finalize(self, _close, self._opened)
        at_fork(self)

    def run(self, request: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a request on the event loop and wait for it. Errors of the client library are raised unchanged."""
        return run_on_loop(request())

    def time_limit(self, n_bytes: int = 0) -> asyncio.Timeout:
        """Return a timeout for the total duration of a request or a response with a body of this size.

        The client's timeouts detect a server that is silent, but not a server that sends or reads very slowly.
        """
        return asyncio.timeout(max_seconds(self._settings, n_bytes))

    @contextlib.asynccontextmanager
    async def send(
        self,
        method: str,
        name: str | None = None,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> AsyncIterator[BlobResponse]:
        """Send one request and yield the response before its body is read.

        Args:
            method: HTTP method.
            name: Name of the blob. None sends the request to the container.
            query: Query of the URL.
            headers: Additional headers.
            body: Body of the request.
        """
        service = self._client().service
        url = self._container_url if name is None else f"{self._container_url}/{quote(name, safe='/~')}"
        if query:
            url += "?" + "&".join(f"{key}={quote(value, safe='')}" for key, value in query.items())
        request = HttpRequest(method, url, {"x-ms-version": service.api_version, **(headers or {})})
        if body is not None:
            request.headers["Content-Type"] = "application/octet-stream"
            request.headers["Content-Length"] = str(len(body))
            # aiohttp sends bytes without yielding to other requests, but a file in chunks.
            data: Any = io.BytesIO(body) if len(body) > _MAX_UNCHUNKED_BYTES else body
            request.data = data
        # The pipeline signs the request and sends it once. The library's methods do not expose a response before its
        # body is read.
        pipeline: Any = service._pipeline  # annotated with the type of the synchronous client
        pipeline_response = await pipeline.run(request, stream=True)
        response = pipeline_response.http_response.internal_response
        try:
            yield BlobResponse(response.status, response.headers, response)
        finally:
            response.release() if response.content.is_eof() else response.close()

    async def delete_batch(self, names: Sequence[str], on_response: Callable[[Mapping[str, str]], None]) -> list[int]:
        """Delete blobs in one request, and return their statuses. Exceptions of the library are raised.

        Args:
            names: Names of the blobs.
            on_response: Called with the headers of the response, even if it is an error.
        """
        container = self._client().service.get_container_client(self._container)
        parts = await container.delete_blobs(
            *names,
            raise_on_any_failure=False,
            raw_response_hook=lambda response: on_response(response.http_response.headers),
        )
        return [part.status_code async for part in parts]

    def after_fork_in_child(self) -> None:
        """Discard the parent's client, and the lock, whose owner may not exist in the child."""
        self._lock = threading.Lock()
        for opened in self._opened:
            leak(opened)
        self._opened.clear()

    def _client(self) -> _OpenClient:
        with self._lock:
            if not self._opened:
                self._opened.append(self._open())
            return self._opened[0]

    def _open(self) -> _OpenClient:
        account, settings = self._account, self._settings
        credential: Any = None
        token = None
        if account.key is not None:
            credential = {"account_name": account.name, "account_key": account.key}
        elif account.sas_token is not None:
            credential = AzureSasCredential(account.sas_token)
        else:
            credential = token = DefaultAzureCredential()
        transport = _SingleRequestTransport(
            connection_timeout=settings.connect_timeout_seconds, read_timeout=settings.read_timeout_seconds
        )
        service = BlobServiceClient(
            account.endpoint,
            credential=credential,
            transport=transport,
            # A client that resends a create after a lost response would find its own file. RetryStorage resends only
            # requests that are safe to repeat.
            retry_total=0,
            permit_redirects=False,
        )
        return _OpenClient(service, token)


async def _close_all(client: _OpenClient) -> None:
    await client.service.close()
    if client.credential is not None:
        await client.credential.close()


def _close(opened: list[_OpenClient]) -> None:
    if opened:
        close_on_loop(lambda: _close_all(opened[0]))


_FOLDER = "hdi_isfolder"


class ListedBlob(NamedTuple):
    """A blob in a listing."""

    name: str
    size_bytes: int
    #: Truncated to seconds.
    last_modified_ms: int


def page_of(document: bytes) -> tuple[list[ListedBlob], str | None]:
    """Parse a page of a listing. Raise ValueError if it is invalid.

    Returns:
        The files of the page, without folders, and the marker of the next page, or None for the last page.
    """
    try:
        root = ET.fromstring(document)
    except ET.ParseError:
        raise ValueError("the response is not XML") from None
    if root.tag != "EnumerationResults":
        raise ValueError("the response is not a listing of blobs")
    blobs = [_blob(element) for element in root.iterfind("Blobs/Blob") if not _is_folder(element)]
    return blobs, root.findtext("NextMarker") or None


def date_ms(text: str) -> int:
    """Parse a date in HTTP format to milliseconds since the epoch. Raise ValueError if it is invalid."""
    date = parsedate_to_datetime(text)
    return int((date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()) * 1000


def _is_folder(blob: ET.Element) -> bool:
    """Whether a blob is a folder of a hierarchical account, or a folder marker of another account."""
    if (blob.findtext("Properties/ResourceType") or "").lower() == "directory":
        return True
    metadata = blob.find("Metadata")
    return metadata is not None and any(
        entry.tag.lower() == _FOLDER and (entry.text or "").lower() == "true" for entry in metadata
    )


def _blob(blob: ET.Element) -> ListedBlob:
    name = blob.find("Name")
    size = blob.findtext("Properties/Content-Length")
    modified = blob.findtext("Properties/Last-Modified")
    if name is None or not name.text or size is None or modified is None:
        raise ValueError("the response has no name, size or time of a blob")
    text = unquote(name.text) if name.get("Encoded", "").lower() == "true" else name.text
    return ListedBlob(text, int(size), date_ms(modified))


#: All exceptions that a request may raise.
CLIENT_ERRORS = (AzureError, aiohttp.ClientError, OSError, ValueError)  # TimeoutError is an OSError


def typed_error(request: StorageRequest, error: BaseException, endpoint: str) -> TrinityLakeError:
    """Return the typed error for an exception of a request.

    Args:
        request: The request that failed.
        error: One of ``CLIENT_ERRORS``.
        endpoint: Address of the service, for the message.
    """
    if isinstance(error, (ClientAuthenticationError, CredentialUnavailableError)):
        return error_without_credentials(request, "there are no valid credentials")
    if isinstance(error, HttpResponseError) and error.status_code is not None:
        return error_from_response(request, error.status_code, code_of(error), None)
    inner = _inner(error)
    if isinstance(error, (AzureError, OSError, aiohttp.ClientError)):
        failure, reason = aiohttp_failure(inner)
        return error_from_transport(request, failure, endpoint, reason)
    return StorageError(
        f"{request.failure}: the Azure client failed ({request.safe(str(error))}); check the storage options",
        path=request.path,
    )


def code_of(error: BaseException) -> str | None:
    """Return the service's error code in an exception of its client library, if there is one."""
    code = getattr(error, "error_code", None)
    return getattr(code, "value", code)


def _inner(error: BaseException) -> BaseException:
    """Return the exception of aiohttp that an exception of azure-core wraps."""
    inner_error = getattr(error, "inner_exception", None)
    return inner_error if isinstance(inner_error, BaseException) else error
