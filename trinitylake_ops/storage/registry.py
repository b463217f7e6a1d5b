"""The schemes of roots, each with its storage, options and environment variables.

Other packages add schemes through entry points in the group ``trinitylake_ops.storages``. The name of an entry point is
the scheme, and its object is a :class:`Scheme`. It is loaded when a root with this scheme is opened.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from trinitylake_ops.errors import InvalidInputError, InvalidLocationError
from trinitylake_ops.extras import needs
from trinitylake_ops.storage.azure import settings as azure
from trinitylake_ops.storage.dynamodb import settings as dynamodb
from trinitylake_ops.storage.gcs import settings as gcs
from trinitylake_ops.storage.hdfs import settings as hdfs
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.storage.local.storage import LocalStorage
from trinitylake_ops.storage.memory import MemoryStorage
from trinitylake_ops.storage.options import WHOLE_FILE_LIMIT, Kind, Option, StorageOptions
from trinitylake_ops.storage.redis import settings as redis
from trinitylake_ops.storage.s3 import settings as s3


@dataclass(frozen=True, slots=True)
class Scheme:
    """A scheme of roots and its storage."""

    #: The part of a root before ``://``.
    name: str
    #: Options in addition to ``COMMON_OPTIONS``.
    options: tuple[Option, ...]
    #: Opens the storage of a normalized root, without retries and without sending a request. The options have plain
    #: names and valid values. Raises InvalidLocationError and InvalidInputError, whose messages contain no credentials,
    #: and MissingExtraError.
    open: Callable[[str, StorageOptions], Storage]
    #: Environment variables that determine the location of a root and the user, unless options specify them.
    environment: tuple[str, ...] = ()
    #: Raises InvalidLocationError for an invalid root. The message contains no credentials.
    check_root: Callable[[str], object] = lambda root: root
    #: Options that determine the server of a root, because two servers can have buckets with the same name.
    server_options: tuple[str, ...] = ()
    #: Returns the options of a root, including credentials, that environment variables set. They are passed to tasks on
    #: other machines. Its arguments are the root and its options.
    from_environment: Callable[[str, Mapping[str, str]], Mapping[str, str]] = lambda root, options: {}
    #: Whether a root contains the files of the roots below it, which means that any folder may be a root.
    roots_nest: bool = True


#: Entry point group for storages from other packages.
ENTRY_POINTS = "trinitylake_ops.storages"

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,15}")


def scheme_of(root_uri: str) -> Scheme:
    """Return the scheme of a root.

    Raises:
        InvalidLocationError: The scheme is unknown. The message does not repeat a text that may be a credential.
        InvalidInputError: The entry point of another package is invalid.
    """
    name, separator, _ = root_uri.partition("://")
    if separator and name in OWN_SCHEMES:
        return OWN_SCHEMES[name]
    external = external_schemes()
    if separator and name in external:
        return _load(external[name])
    # Without "://", the text may be a credential instead of a scheme.
    description = f"the scheme {name!r}" if _SCHEME.fullmatch(name) else "this scheme"
    description = description if separator else "a root without a scheme"
    *first, last = (f"{scheme}://" for scheme in (*OWN_SCHEMES, *sorted(external)))
    raise InvalidLocationError(f"{description} is not supported; use {', '.join(first)} or {last}")


def check_root(root_uri: str) -> None:
    """Check the form of a normalized root with a built-in scheme. Other roots are checked when they are opened.

    Raises InvalidLocationError if it is invalid. The message contains no credentials.
    """
    scheme = OWN_SCHEMES.get(root_uri.partition("://")[0])
    if scheme is not None:
        scheme.check_root(root_uri)


def environment_of(root_uri: str) -> tuple[str, ...]:
    """Return the environment variables that determine a root's location and user, unless options specify them.

    The result is empty for an unknown scheme.
    """
    try:
        return scheme_of(root_uri).environment
    except InvalidLocationError:
        return ()


def server_options(root_uri: str) -> tuple[str, ...]:
    """Return the options that determine the server of a root. The result is empty for schemes from other packages."""
    scheme = OWN_SCHEMES.get(root_uri.partition("://")[0])
    return () if scheme is None else scheme.server_options


def roots_nest(uri: str) -> bool:
    """Whether the folder of a file may be opened as a root. True for an unknown scheme."""
    try:
        return scheme_of(uri).roots_nest
    except InvalidLocationError:
        return True


def external_schemes() -> Mapping[str, EntryPoint]:
    """Return the entry points of other packages by scheme. They cannot replace built-in schemes."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS) if point.name not in OWN_SCHEMES}


@functools.cache
def _load(point: EntryPoint) -> Scheme:
    scheme = point.load()
    if not isinstance(scheme, Scheme) or scheme.name != point.name:
        raise InvalidInputError(
            f"the entry point {point.name!r} of the group {ENTRY_POINTS!r} is invalid: {point.value!r} must be a Scheme"
            " with that name"
        )
    return scheme


_FSYNC = Option(
    "fsync",
    "sync the file, its folder and its parent folders up to the root to the device before a call returns",
    Kind.FLAG,
    default=True,
)
_FOLLOW_LINKS = Option(
    "follow_links",
    "follow symbolic links below the root, but out of the folder of a table only to an allowed root; 'false' rejects"
    " all links",
    Kind.FLAG,
    default=True,
)


def _open_local(root: str, options: StorageOptions) -> Storage:
    return LocalStorage(
        root,
        fsync=_FSYNC.value(options),
        whole_file_limit_bytes=WHOLE_FILE_LIMIT.value(options),
        follows_links=_FOLLOW_LINKS.value(options),
    )


def _open_memory(root: str, options: StorageOptions) -> Storage:
    return MemoryStorage(root, whole_file_limit_bytes=WHOLE_FILE_LIMIT.value(options))


def _open_hdfs(root: str, options: StorageOptions) -> Storage:
    with needs("hdfs"):
        from trinitylake_ops.storage.hdfs.storage import HdfsStorage

    return HdfsStorage(root, options)


def _open_s3(root: str, options: StorageOptions) -> Storage:
    # Imported here, because the client libraries take a substantial fraction of a second to load.
    if s3.CLIENT.value(options) == "obstore":
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
        from trinitylake_ops.storage.azure.blob_storage import AzureStorage

    return AzureStorage(root, options)


#: The built-in schemes, by name.
OWN_SCHEMES: Mapping[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("file", (_FSYNC, _FOLLOW_LINKS), _open_local),
        Scheme("memory", (), _open_memory),
        Scheme(
            "s3",
            s3.S3_OPTIONS,
            _open_s3,
            s3.S3_ENVIRONMENT,
            s3.S3Location.of,
            server_options=("endpoint",),
            from_environment=s3.s3_of_environment,
        ),
        *(
            Scheme(
                name,
                azure.AZURE_OPTIONS,
                _open_azure,
                azure.AZURE_ENVIRONMENT,
                azure.AzureLocation.of,
                server_options=server_options,
                from_environment=azure.account_of_environment,
            )
            for name, server_options in (("abfss", ()), ("az", ("endpoint", "account_name")))
        ),
        Scheme(
            "gs",
            gcs.GCS_OPTIONS,
            _open_gcs,
            gcs.GCS_ENVIRONMENT,
            gcs.GcsLocation.of,
            server_options=("endpoint",),
            from_environment=gcs.gcs_of_environment,
        ),
        Scheme(
            "dynamodb",
            dynamodb.DYNAMODB_OPTIONS,
            _open_dynamodb,
            dynamodb.DYNAMODB_ENVIRONMENT,
            dynamodb.DynamoDBLocation.of,
            server_options=("endpoint",),
            from_environment=dynamodb.dynamodb_of_environment,
            roots_nest=False,
        ),
        *(
            Scheme(
                name,
                redis.REDIS_OPTIONS,
                _open_redis,
                redis.REDIS_ENVIRONMENT,
                redis.RedisLocation.of,
                from_environment=redis.redis_of_environment,
            )
            for name in ("redis", "rediss")
        ),
        Scheme(
            "hdfs",
            hdfs.HDFS_OPTIONS,
            _open_hdfs,
            hdfs.HDFS_ENVIRONMENT,
            hdfs.HdfsLocation.of,
            server_options=("namenodes",),
        ),
    )
}
