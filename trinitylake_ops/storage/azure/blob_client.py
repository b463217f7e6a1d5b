"""The client of Azure's Blob service, the pages of its listings, and its exceptions as errors of a storage.

adlfs wraps the same client, and is left out here. Its operations take several requests each. It sends large bodies as
lists of blocks, and closes itself in a way that fails in a forked child.
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
from trinitylake_ops.storage.http.settings import longest_seconds

T = TypeVar("T")

_AT_ONCE_BYTES = 1 << 18


class _SingleRequestTransport(AioHttpTransport):  # type: ignore[misc] # azure-core hides its type behind a __getattr__
    """The transport of azure-core without aiohttp's own second sends.

    aiohttp repeats a PUT or DELETE whose connection broke before the answer, without a word. A repeated create would
    meet the file of its first send and report it as another writer's. A test on the wire watches that this is off.
    """

    async def open(self) -> None:
        await super().open()
        assert self.session is not None
        self.session._retry_connection = False


class BlobResponse(NamedTuple):
    """An answer whose body is still to be read. The names of its headers have no case."""

    status: int
    headers: Mapping[str, str]
    response: Any  # of aiohttp

    @property
    def error_code(self) -> str | None:
        """The service's own word for what went wrong."""
        return self.headers.get("x-ms-error-code")


@dataclass(frozen=True, slots=True)
class _Opened:
    service: BlobServiceClient
    credential: DefaultAzureCredential | None


class BlobClient:
    """Requests to one container from any thread of any process.

    An event loop does not survive a fork, so a forked child gets a client of its own at its first request. The client
    closes when this object is dropped.
    """

    def __init__(self, container: str, account: Account, settings: AzureSettings):
        self._container_url = f"{account.endpoint}/{container}"
        self._container = container
        self._account = account
        self._settings = settings
        self._lock = threading.Lock()
        self._opened: list[_Opened] = []  # the client of this process, once it is needed
        weakref.finalize(self, _close, self._opened)
        at_fork(self)

    def run(self, request: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a request on the event loop and wait for it. Raises what the client library raises."""
        return run_on_loop(request())

    def time_limit(self, n_bytes: int = 0) -> asyncio.Timeout:
        """Bound the transfer of a request or an answer with this many bytes of body.

        Raises TimeoutError after that time. The client's own time-outs see a silent server, but not one that trickles
        or stops reading.
        """
        return asyncio.timeout(longest_seconds(self._settings, n_bytes))

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
        """Send one request about a blob or, without a name, the container, and give its answer to the block."""
        service = self._client().service
        url = self._container_url if name is None else f"{self._container_url}/{quote(name, safe='/~')}"
        if query:
            url += "?" + "&".join(f"{key}={quote(value, safe='')}" for key, value in query.items())
        request = HttpRequest(method, url, {"x-ms-version": service.api_version, **(headers or {})})
        if body is not None:
            request.headers["Content-Type"] = "application/octet-stream"
            request.headers["Content-Length"] = str(len(body))
            # aiohttp sends raw bytes at once, and keeps other requests waiting meanwhile.
            data: Any = io.BytesIO(body) if len(body) > _AT_ONCE_BYTES else body
            request.data = data
        # The pipeline signs, and sends once. The library's own calls give no answer to look at before its body.
        pipeline: Any = service._pipeline  # its type is that of the synchronous client's
        sent = await pipeline.run(request, stream=True)
        response = sent.http_response.internal_response
        try:
            yield BlobResponse(response.status, response.headers, response)
        finally:
            response.release() if response.content.is_eof() else response.close()

    async def delete_batch(self, names: Sequence[str], on_response: Callable[[Mapping[str, str]], None]) -> list[int]:
        """Delete blobs in one request, and return the status of each. Raises the library's exceptions.

        ``on_response`` gets the headers of the answer, also of a refusal.
        """
        container = self._client().service.get_container_client(self._container)
        parts = await container.delete_blobs(
            *names,
            raise_on_any_failure=False,
            raw_response_hook=lambda response: on_response(response.http_response.headers),
        )
        return [part.status_code async for part in parts]

    def after_fork_in_child(self) -> None:
        """Start anew in a forked child. The client is its parent's, and the thread that held the lock is gone."""
        self._lock = threading.Lock()
        for opened in self._opened:
            leak(opened)
        self._opened.clear()

    def _client(self) -> _Opened:
        with self._lock:
            if not self._opened:
                self._opened.append(self._open())
            return self._opened[0]

    def _open(self) -> _Opened:
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
            # A client that repeats a create after a lost answer meets its own file. RetryStorage repeats only safe
            # requests.
            retry_total=0,
            permit_redirects=False,
        )
        return _Opened(service, token)


async def _close_all(opened: _Opened) -> None:
    await opened.service.close()
    if opened.credential is not None:
        await opened.credential.close()


def _close(opened: list[_Opened]) -> None:
    if opened:
        close_on_loop(lambda: _close_all(opened[0]))


_FOLDER = "hdi_isfolder"


class ListedBlob(NamedTuple):
    """A blob of a page. The time has whole seconds."""

    name: str
    size_bytes: int
    last_modified_ms: int


def page_of(document: bytes) -> tuple[list[ListedBlob], str | None]:
    """Return the files of a page, without folders, and where the next page starts, None after the last.

    Raises ValueError for a document that is no such page.
    """
    try:
        root = ET.fromstring(document)
    except ET.ParseError:
        raise ValueError("the answer is no XML") from None
    if root.tag != "EnumerationResults":
        raise ValueError("the answer is no list of blobs")
    blobs = [_blob(element) for element in root.iterfind("Blobs/Blob") if not _is_folder(element)]
    return blobs, root.findtext("NextMarker") or None


def date_ms(text: str) -> int:
    """Return the milliseconds since the epoch of a date of the service. Raises ValueError."""
    moment = parsedate_to_datetime(text)
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()) * 1000


def _is_folder(blob: ET.Element) -> bool:
    """Whether this is a folder: one of a hierarchical account, or the marker of one that programs leave elsewhere."""
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
        raise ValueError("the answer names no blob, size or time")
    text = unquote(name.text) if name.get("Encoded", "").lower() == "true" else name.text
    return ListedBlob(text, int(size), date_ms(modified))


#: Every exception that a request may end with.
CLIENT_ERRORS = (AzureError, aiohttp.ClientError, OSError, ValueError)  # TimeoutError too


def typed_error(request: StorageRequest, error: BaseException, endpoint: str) -> TrinityLakeError:
    """Return the typed error for the end of a request without an answer, one of ``CLIENT_ERRORS``."""
    if isinstance(error, (ClientAuthenticationError, CredentialUnavailableError)):
        return error_without_credentials(request, "there are no valid credentials")
    if isinstance(error, HttpResponseError) and error.status_code is not None:
        return error_from_response(request, error.status_code, code_of(error), None)
    inner = _inner(error)
    if isinstance(error, (AzureError, OSError, aiohttp.ClientError)):
        failure, reason = aiohttp_failure(inner)
        return error_from_transport(request, failure, endpoint, reason)
    return StorageError(
        f"{request.failure}: the client of Azure cannot be used ({request.safe(str(error))}); check the storage"
        " options",
        path=request.path,
    )


def code_of(error: BaseException) -> str | None:
    """Return the service's own word behind an exception of its library, if there is one."""
    code = getattr(error, "error_code", None)
    return getattr(code, "value", code)


def _inner(error: BaseException) -> BaseException:
    """Return the exception of aiohttp behind one of azure-core."""
    given = getattr(error, "inner_exception", None)
    return given if isinstance(given, BaseException) else error
