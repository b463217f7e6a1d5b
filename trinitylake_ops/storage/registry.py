"""The kinds of storage by the scheme of a root, with their options and packages.

Another package adds one by an entry point of the group ``trinitylake_ops.storages``. The entry point has the name of
the scheme and leads to its :class:`~trinitylake_ops.storage.registry.Scheme`. It is loaded when such a root is opened.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from trinitylake_ops.errors import InvalidInputError, InvalidLocationError
from trinitylake_ops.extras import needs
from trinitylake_ops.storage.azure.settings import (
    AZURE_CLIENTS,
    AZURE_ENVIRONMENT,
    AZURE_OPTIONS,
    AzureLocation,
    account_of_environment,
)
from trinitylake_ops.storage.dynamodb.settings import (
    DYNAMODB_ENVIRONMENT,
    DYNAMODB_OPTIONS,
    DynamoDBLocation,
    dynamodb_of_environment,
)
from trinitylake_ops.storage.gcs.settings import GCS_ENVIRONMENT, GCS_OPTIONS, GcsLocation, gcs_of_environment
from trinitylake_ops.storage.hdfs.settings import HDFS_ENVIRONMENT, HDFS_OPTIONS, HdfsLocation
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.storage.local.storage import LocalStorage
from trinitylake_ops.storage.memory import MemoryStorage
from trinitylake_ops.storage.options import StorageOptions, whole_file_limit_bytes
from trinitylake_ops.storage.redis.settings import REDIS_ENVIRONMENT, REDIS_OPTIONS, RedisLocation, redis_of_environment
from trinitylake_ops.storage.s3.settings import S3_CLIENTS, S3_ENVIRONMENT, S3_OPTIONS, S3Location, s3_of_environment


@dataclass(frozen=True, slots=True)
class Scheme:
    """A kind of storage.

    ``name`` is what its roots begin with, before ``://``. ``options`` are the names of its own options
    (docs/storage.md). ``open`` returns the storage of a normalized root, without retries around it, and sends no
    request. It raises InvalidLocationError and InvalidInputError, which repeat no credentials, and MissingExtraError.
    ``environment`` are the variables that decide where a root is and who asks, where the options do not say.
    ``check_root`` raises InvalidLocationError for a root of another form, and repeats no credentials. ``place`` are the
    options that decide which server a root is on, as two servers have two buckets of one name. ``from_environment``
    returns the options that the environment gives to a root with these options, credentials among them. Tasks on other
    machines get them. ``roots_nest`` is false where a root does not show what is under the roots below it. There, no
    folder can be taken for a root.
    """

    name: str
    options: frozenset[str]
    open: Callable[[str, StorageOptions], Storage]
    environment: tuple[str, ...] = ()
    check_root: Callable[[str], object] = lambda root: root
    place: tuple[str, ...] = ()
    from_environment: Callable[[str, Mapping[str, str]], Mapping[str, str]] = lambda root, options: {}
    roots_nest: bool = True


ENTRY_POINTS = "trinitylake_ops.storages"

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,15}")


def scheme_of(root_uri: str) -> Scheme:
    """Return the kind of storage of a root.

    Raises InvalidLocationError for a scheme that is not known, without repeating what may be a credential. Raises
    InvalidInputError where another package does not give what its entry point promises.
    """
    name, separator, _ = root_uri.partition("://")
    if separator and name in OWN_SCHEMES:
        return OWN_SCHEMES[name]
    others = _added()
    if separator and name in others:
        return _loaded(others[name])
    # The text there may be no scheme at all, but a credential in the wrong place.
    shown = f"the scheme {name!r}" if _SCHEME.fullmatch(name) else "this scheme"
    shown = shown if separator else "a root without a scheme"
    *first, last = (f"{known}://" for known in (*OWN_SCHEMES, *sorted(others)))
    raise InvalidLocationError(f"{shown} is not supported: roots start with {', '.join(first)} or {last}")


def check_root(root_uri: str) -> None:
    """Check the form of a normalized root of our own schemes; others are checked when they are opened.

    Raises InvalidLocationError, which repeats no credentials.
    """
    scheme = OWN_SCHEMES.get(root_uri.partition("://")[0])
    if scheme is not None:
        scheme.check_root(root_uri)


def environment_of(root_uri: str) -> tuple[str, ...]:
    """Return the variables that decide where a root is and who asks, if its options do not. None of an unknown one."""
    try:
        return scheme_of(root_uri).environment
    except InvalidLocationError:
        return ()


def server_options(root_uri: str) -> tuple[str, ...]:
    """Return the options that decide which server a root of our own schemes is on. None of another."""
    scheme = OWN_SCHEMES.get(root_uri.partition("://")[0])
    return () if scheme is None else scheme.place


def roots_nest(uri: str) -> bool:
    """Whether the folder of a file may be taken for a root, given the file's URI. True of an unknown scheme."""
    try:
        return scheme_of(uri).roots_nest
    except InvalidLocationError:
        return True


def with_environment(root_uri: str, options: Mapping[str, str]) -> StorageOptions:
    """Return the options of a lakehouse, with those that the environment gives below them: for tasks elsewhere.

    Credentials are among them, each where the options have none. Those for other roots than the lakehouse's have
    their scheme before their name.
    """
    given, own = StorageOptions(options), root_uri.partition("://")[0]
    found: dict[str, str] = {}
    for name, scheme in OWN_SCHEMES.items():
        of_scheme = given.of_scheme(name, is_own=name == own)
        more = scheme.from_environment(root_uri if name == own else f"{name}://", of_scheme)
        found |= more if name == own else {f"{name}.{option}": value for option, value in more.items()}
    return StorageOptions({**found, **given})


def is_added(scheme: str) -> bool:
    """Whether another package adds this scheme."""
    return scheme in _added()


def _added() -> Mapping[str, EntryPoint]:
    """Return the entry points of other packages by their schemes. None of them takes the place of our own."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS) if point.name not in OWN_SCHEMES}


@functools.cache
def _loaded(point: EntryPoint) -> Scheme:
    found = point.load()
    if not isinstance(found, Scheme) or found.name != point.name:
        raise InvalidInputError(
            f"the entry point {point.name!r} of the group {ENTRY_POINTS!r} leads to {point.value!r}, which is no Scheme"
            " of that name"
        )
    return found


def _open_local(root: str, options: StorageOptions) -> Storage:
    return LocalStorage(
        root,
        fsync=options.flag("fsync", default=True),
        whole_file_limit_bytes=whole_file_limit_bytes(options),
        follows_links=options.flag("follow_links", default=True),
    )


def _open_memory(root: str, options: StorageOptions) -> Storage:
    return MemoryStorage(root, whole_file_limit_bytes=whole_file_limit_bytes(options))


def _open_hdfs(root: str, options: StorageOptions) -> Storage:
    with needs("hdfs"):
        from trinitylake_ops.storage.hdfs.storage import HdfsStorage

    return HdfsStorage(root, options)


def _open_s3(root: str, options: StorageOptions) -> Storage:
    # The client libraries take a good part of a second to load. Other roots should not pay for that.
    if options.one_of("client", S3_CLIENTS) == "obstore":
        with needs("obstore"):
            from trinitylake_ops.storage.s3.obstore_storage import ObstoreS3Storage

        return ObstoreS3Storage(root, options)
    with needs("s3"):
        from trinitylake_ops.storage.s3.s3fs_storage import S3Storage

    return S3Storage(root, options)


def _open_gcs(root: str, options: StorageOptions) -> Storage:
    with needs("gcs"):
        from trinitylake_ops.storage.gcs.storage import GcsStorage

    return GcsStorage(root, options)


def _open_dynamodb(root: str, options: StorageOptions) -> Storage:
    with needs("dynamodb"):
        from trinitylake_ops.storage.dynamodb.storage import DynamoDBStorage

    return DynamoDBStorage(root, options)


def _open_redis(root: str, options: StorageOptions) -> Storage:
    with needs("redis"):
        from trinitylake_ops.storage.redis.storage import RedisStorage

    return RedisStorage(root, options)


def _open_azure(root: str, options: StorageOptions) -> Storage:
    with needs("azure"):
        if options.one_of("client", AZURE_CLIENTS) == "obstore":
            from trinitylake_ops.storage.azure.obstore_storage import ObstoreAzureStorage

            return ObstoreAzureStorage(root, options)
        from trinitylake_ops.storage.azure.blob_storage import AzureStorage

        return AzureStorage(root, options)


OWN_SCHEMES: Mapping[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("file", frozenset({"fsync", "follow_links"}), _open_local),
        Scheme("memory", frozenset(), _open_memory),
        Scheme("s3", S3_OPTIONS, _open_s3, S3_ENVIRONMENT, S3Location.of, ("endpoint",), s3_of_environment),
        Scheme(
            "abfss",
            AZURE_OPTIONS,
            _open_azure,
            AZURE_ENVIRONMENT,
            AzureLocation.of,
            from_environment=account_of_environment,
        ),
        Scheme(
            "az",
            AZURE_OPTIONS,
            _open_azure,
            AZURE_ENVIRONMENT,
            AzureLocation.of,
            ("endpoint", "account_name"),
            account_of_environment,
        ),
        Scheme("gs", GCS_OPTIONS, _open_gcs, GCS_ENVIRONMENT, GcsLocation.of, ("endpoint",), gcs_of_environment),
        Scheme(
            "dynamodb",
            DYNAMODB_OPTIONS,
            _open_dynamodb,
            DYNAMODB_ENVIRONMENT,
            DynamoDBLocation.of,
            ("endpoint",),
            dynamodb_of_environment,
            roots_nest=False,
        ),
        Scheme(
            "redis",
            REDIS_OPTIONS,
            _open_redis,
            REDIS_ENVIRONMENT,
            RedisLocation.of,
            from_environment=redis_of_environment,
        ),
        Scheme(
            "rediss",
            REDIS_OPTIONS,
            _open_redis,
            REDIS_ENVIRONMENT,
            RedisLocation.of,
            from_environment=redis_of_environment,
        ),
        Scheme("hdfs", HDFS_OPTIONS, _open_hdfs, HDFS_ENVIRONMENT, HdfsLocation.of, ("namenodes",)),
    )
}
