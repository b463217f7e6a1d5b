"""S3 through obstore."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit, urlunsplit

import botocore
import botocore.session
import obstore
from botocore.credentials import RefreshableCredentials
from botocore.exceptions import BotoCoreError
from obstore.exceptions import InvalidPathError, UnauthenticatedError
from obstore.store import S3Store

from trinitylake_ops.errors import FileMissingError, StorageError, TrinityLakeError
from trinitylake_ops.storage.http.aws import error_without_credentials
from trinitylake_ops.storage.http.clients import ClientCache, Fork, ObstoreClients
from trinitylake_ops.storage.http.obstore_errors import (
    OBSTORE_ERRORS,
    is_response_missing,
    reason,
    server_message,
    status_and_code,
    transport_failure,
)
from trinitylake_ops.storage.http.requests import Request, StorageRequest, TransportFailure, error_from_transport
from trinitylake_ops.storage.interface import FileInfo
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.storage.paths import check_range, is_hidden
from trinitylake_ops.storage.retry import retry_listing
from trinitylake_ops.storage.s3 import s3fs_client as s3_failures
from trinitylake_ops.storage.s3.errors import error_from_response, is_range_beyond_end
from trinitylake_ops.storage.s3.s3fs_client import S3Client, bucket_address, new_session
from trinitylake_ops.storage.s3.s3fs_storage import S3Storage
from trinitylake_ops.storage.s3.settings import MAX_KEYS_PER_REQUEST, S3Settings, s3_of_environment

if TYPE_CHECKING:
    from obstore import GetOptions, ListStream, ObjectMeta, PutMode
    from obstore.store import ClientConfig, S3Credential


class S3Stores(ObstoreClients[S3Store]):
    """Clients for the requests of one bucket.

    Botocore resolves credentials, region and place that are not given as options, as for s3fs.
    """

    def __init__(self, bucket: str, settings: S3Settings, options: StorageOptions):
        super().__init__(settings)
        self._bucket = bucket
        self._settings = settings
        self._options = options
        self._place: tuple[str, str, bool] | None = None
        self._provider: Callable[[], S3Credential] | None = None

    @classmethod
    def shared(cls, client: S3Client, bucket: str, settings: S3Settings, options: StorageOptions) -> S3Stores:
        """Return the clients of this process for a bucket, beside the shared one of s3fs (decision 33).

        That one is the same for equal settings in an equal environment, so it stands for both here.
        """
        return _kept.get((client, bucket), lambda: cls(bucket, settings, options))

    def _new_store(self, limits: ClientConfig, timeout: timedelta) -> S3Store:
        if self._place is None or self._provider is None:
            self._resolve()
        assert self._place is not None and self._provider is not None
        endpoint, region, virtual = self._place
        return S3Store(
            self._bucket,
            # Defaults are given too, since obstore takes other values from the environment: AWS_ENDPOINT_URL_S3,
            # AWS_CONDITIONAL_PUT, AWS_SKIP_SIGNATURE would replace our own.
            config={
                "aws_endpoint_url_s3": endpoint,
                "endpoint": endpoint,
                "region": region,
                "virtual_hosted_style_request": virtual,
                "conditional_put": "etag",
                "skip_signature": False,
                "s3_express": False,
            },
            client_options={"allow_http": endpoint.startswith("http://"), **limits},
            # A client that repeats a create after a lost answer meets its own file. RetryStorage repeats only safe
            # requests.
            retry_config={"max_retries": 0, "retry_timeout": timeout},
            credential_provider=self._provider,
        )

    def _resolve(self) -> None:
        session = new_session(self._options)
        self._provider = _credential_provider(session)
        place = bucket_address(session, self._settings, self._bucket)
        parts = urlsplit(place.endpoint)
        netloc = f"{self._bucket}.{parts.netloc}" if place.is_virtual else parts.netloc
        endpoint = urlunsplit((parts.scheme, netloc, parts.path, "", ""))
        self._place = (endpoint, place.region, place.is_virtual)


_kept: ClientCache[S3Stores] = ClientCache()


def _credential_provider(session: botocore.session.Session) -> Callable[[], S3Credential]:
    """Return a provider of credentials for obstore: botocore's chain, which renews those that expire.

    Raises NoCredentialsError when there are none, and the errors of a source of credentials.
    """
    credentials = session.get_credentials()
    if credentials is None:
        raise botocore.exceptions.NoCredentialsError
    passing = isinstance(credentials, RefreshableCredentials)

    def current() -> S3Credential:
        frozen = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            # The renewal is due at once: botocore itself knows when to renew, and is asked before each request.
            "expires_at": datetime.now(UTC) if passing else None,
        }

    return current


_PROVIDER = "External AWS credential provider"


def typed_error(request: StorageRequest, error: BaseException, endpoint: str) -> TrinityLakeError:
    """Return the typed error for the end of a request, one of obstore's."""
    text = str(error)
    status, code = status_and_code(error)
    if status is not None:
        return error_from_response(request, status, code, server_message(error))
    if isinstance(error, UnauthenticatedError) and _PROVIDER in text:
        return error_without_credentials(request, "AWS's environment gives no valid credentials")
    if is_response_missing(error):
        return error_from_transport(request, transport_failure(error), endpoint, reason(error))
    if request.operation.changes_files:
        # The server may have done its work, though obstore cannot read the answer.
        return error_from_transport(request, TransportFailure.NO_ANSWER, endpoint, "an answer that cannot be read")
    return StorageError(
        f"{request.failure}: obstore cannot read the server's answer; try the option 'client' = 's3fs', "
        "and check the option 'endpoint'",
        path=request.path,
    )


T = TypeVar("T")

# obstore parses keys as paths and refuses ASCII control characters in them. All other names of a path,
# those with '%', '?', spaces or '\\' too, go to S3 and come back literally.
_NOT_IN_OBSTORE = re.compile(r"[\x00-\x1f\x7f]")


class ObstoreS3Storage(S3Storage):
    """Like S3Storage, but faster. It reads, looks up, creates, writes and lists through obstore.

    The rest is S3Storage's, since obstore does not do it as the interface promises. This is the case for deletes, as
    obstore gives one error for a DeleteObjects that failed for some files. It is the case for ``now_ms``, as obstore
    shows no ``Date``, and for names with control characters. In a list, it is the rest after a key that obstore
    refuses, such as ``a//b``. In a forked child it is everything. A key ``folder/`` costs one request per list to tell
    it from an empty file. Every empty file does, too.
    """

    concurrency = 32
    lists_by_prefix = True

    def __init__(self, root: str, options: Mapping[str, str] | None = None):
        super().__init__(root, options)
        self._stores = S3Stores.shared(self._client, self._location.bucket, self._settings, self.options)

    def __repr__(self) -> str:
        return f"ObstoreS3Storage({self.root!r}, {self.options!r})"

    def __reduce__(self) -> tuple[type[ObstoreS3Storage], tuple[str, StorageOptions]]:
        return (ObstoreS3Storage, (self.root, self.options.on_top_of(s3_of_environment(self.root, self.options))))

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        check_range(path, offset, length)
        if length == 0 or not self._for_obstore(path):
            return super().read(path, offset=offset, length=length, limit_bytes=limit_bytes)
        key = self._location.key(path)
        options: GetOptions = {}
        if length is not None:
            options = {"range": (offset, offset + length)}
        elif offset:
            options = {"range": {"offset": offset}}

        def get() -> bytes | None:
            try:
                response = obstore.get(self._stores.for_reading(), key, options=options)
                self._check_size(path, response.range[1] - response.range[0], length, limit_bytes)
                return self._stores.body_of(response)
            except OBSTORE_ERRORS as error:
                if is_range_beyond_end(*status_and_code(error)):
                    return None
                raise

        return self._sent(Request.READ, path, get) or b""

    def stat(self, path: str) -> FileInfo:
        if not self._for_obstore(path):
            return super().stat(path)
        key = self._location.key(path)
        found = self._sent(Request.STAT, path, lambda: obstore.head(self._stores.for_body(), key))
        return _file_info(path, found)

    def create(self, path: str, data: bytes) -> None:
        if not self._for_obstore(path):
            return super().create(path, data)
        return self._put(Request.CREATE, path, data)

    def write(self, path: str, data: bytes) -> None:
        if not self._for_obstore(path):
            return super().write(path, data)
        return self._put(Request.WRITE, path, data)

    def expect_clock(self) -> None:
        """Ask beside: answers through obstore show no ``Date``."""
        self._clock.expect(self._fetch_time)

    def _put(self, operation: Request, path: str, data: bytes) -> None:
        key, body = self._location.key(path), bytes(data)

        def put() -> None:
            # "create" sends If-None-Match: *; use_multipart=False keeps it one PUT at any size.
            mode: PutMode = "create" if operation is Request.CREATE else "overwrite"
            obstore.put(self._stores.for_body(len(body)), key, body, mode=mode, use_multipart=False)

        self._sent(operation, path, put)

    def _files(self, prefix: str, key_prefix: str) -> Iterator[FileInfo]:
        last_key, empty_paths = "", set[str]()
        for page in self._obstore_pages(prefix, key_prefix):
            if page is None:
                rest = super()._files(prefix, key_prefix)
                yield from (file for file in rest if self._location.key(file.path) > last_key)
                return
            self._check_order(prefix, last_key, page)
            yield from self._shown(prefix, key_prefix, page, empty_paths)
            last_key = max(last_key, *(found["path"] for found in page))
            empty_paths = {path for path in empty_paths if is_folder_ahead(self._location.key(path), last_key)}

    def _check_order(self, prefix: str, last_key: str, page: Sequence[ObjectMeta]) -> None:
        """Raise StorageError for a list in no order. The part that is asked for would seem to end early."""
        keys = [last_key, *(found["path"] for found in page if found["size"])]  # names of folders lost their last "/"
        if keys != sorted(keys):
            raise StorageError(
                f"cannot list {prefix!r} under {self.root}: the server lists files in no order, as directory buckets"
                " do; set the option 'client' to 's3fs'",
                path=prefix,
            )

    def _obstore_pages(self, prefix: str, key_prefix: str) -> Iterator[Sequence[ObjectMeta] | None]:
        """Yield the pages of a list in the order of the keys, None where obstore cannot go on.

        The lists of obstore have whole folders. So a list by a part of a name starts shortly before the first such name
        and ends after the last. It has at most a page more than the files that it yields, and the files of the folder
        ``a/`` for a prefix ``a0``.
        """
        stream: ListStream[Sequence[ObjectMeta]] | None = None
        start_after = _start_before(key_prefix)

        def next_page() -> Sequence[ObjectMeta] | None:
            nonlocal stream
            if not self._for_obstore(key_prefix):
                return None
            if stream is None:
                folder, store = key_prefix.rpartition("/")[0] or None, self._stores.for_body()
                stream = obstore.list(store, folder, offset=start_after, chunk_size=MAX_KEYS_PER_REQUEST)
            try:
                return next(stream, ())
            except InvalidPathError:
                return None
            except OBSTORE_ERRORS:
                stream = None  # the generator has ended; another try starts after the last page
                raise

        def sent_page() -> Sequence[ObjectMeta] | None:
            return self._sent(Request.LIST, prefix, next_page)

        page = sent_page()
        while page:
            yield page
            start_after = max(found["path"] for found in page)
            if start_after > key_prefix and not start_after.startswith(key_prefix):
                return
            page = retry_listing(sent_page)
        if page is None:
            yield None

    def _shown(
        self, prefix: str, key_prefix: str, page: Sequence[ObjectMeta], empty_paths: set[str]
    ) -> Iterator[FileInfo]:
        """Yield the files of a page. ``empty_paths`` are those of empty files that may be shown once more."""
        empty = []
        for found in page:
            key = found["path"]
            path = self._location.path(key) if key.startswith(key_prefix) else None
            if path is None or is_hidden(path, prefix):
                continue
            if found["size"]:
                yield _file_info(path, found)
            elif path not in empty_paths:
                empty_paths.add(path)
                empty.append(_file_info(path, found))
        # An object "folder/" is shown as "folder", and is empty. A file "folder" may be empty, too.
        are_files = run_parallel(self._is_empty_file, [file.path for file in empty], self.concurrency)
        yield from (file for file, is_file in zip(empty, are_files, strict=True) if is_file)

    def _is_empty_file(self, path: str) -> bool:
        try:
            return self.stat(path).size_bytes == 0
        except FileMissingError:
            return False

    def _for_obstore(self, path: str) -> bool:
        return not (Fork.happened or _NOT_IN_OBSTORE.search(self._location.key_prefix + path))

    def _sent(self, operation: Request, path: str, send: Callable[[], T]) -> T:
        try:
            return send()
        except OBSTORE_ERRORS as error:
            failure = typed_error(self._request(operation, path), error, self._endpoint)
        except BotoCoreError as error:
            failure = s3_failures.typed_error(self._request(operation, path), error, self._endpoint)
        # This is raised outside the handler: the text of the client's error holds the raw answer and the request.
        raise failure


def is_folder_ahead(key: str, last_key: str) -> bool:
    """Whether a list in the order of keys may still bring an object ``key/`` after ``last_key``."""
    return f"{key}/" >= last_key


def _start_before(key_prefix: str) -> str | None:
    """Return a string that sorts before all keys with this prefix and after nearly all smaller ones."""
    last = key_prefix[-1:]
    if last in ("", "/", " "):
        return None  # the list of the folder starts there anyway
    # obstore takes no control characters, and drops a second "/"; a surrogate is no character.
    before = {"0": ".", "\x80": "~", "\ue000": "\ud7ff"}.get(last, chr(ord(last) - 1))
    return f"{key_prefix[:-1]}{before}\U0010fffd"


def _file_info(path: str, found: ObjectMeta) -> FileInfo:
    # Lists give milliseconds, the answers about a file whole seconds.
    return FileInfo(path, found["size"], int(found["last_modified"].timestamp()) * 1000)
