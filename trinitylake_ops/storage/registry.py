"""The kinds of storage by the scheme of a root, with their options and packages.

Another package adds one by an entry point of the group ``trinitylake_ops.storages``. The entry point has the name of
the scheme and leads to its :class:`~trinitylake_ops.storage.registry.Scheme`. It is loaded when such a root is opened.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
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
from trinitylake_ops.storage.meter import ObservedStorage
from trinitylake_ops.storage.options import COMMON_OPTIONS, WHOLE_FILE_LIMIT, Kind, Option, StorageOptions
from trinitylake_ops.storage.redis import settings as redis
from trinitylake_ops.storage.retry import RetryStorage
from trinitylake_ops.storage.s3 import settings as s3
from trinitylake_ops.telemetry.settings import is_enabled


@dataclass(frozen=True, slots=True)
class Scheme:
    """A kind of storage."""

    #: What its roots begin with, before ``://``.
    name: str
    #: The options that it accepts in addition to ``COMMON_OPTIONS``.
    options: tuple[Option, ...]
    #: Returns the storage of a normalized root, without retries around it, and sends no request. The options have their
    #: plain names and accepted values. Raises InvalidLocationError and InvalidInputError, which repeat no credentials,
    #: and MissingExtraError.
    open: Callable[[str, StorageOptions], Storage]
    #: The variables that decide where a root is and which user sends its requests, where the options do not.
    environment: tuple[str, ...] = ()
    #: Raises InvalidLocationError for a root of another form, and repeats no credentials.
    check_root: Callable[[str], object] = lambda root: root
    #: The options that decide which server a root is on, because two servers can have two buckets of one name.
    place: tuple[str, ...] = ()
    #: Returns the options, including credentials, that the environment gives to a root with these options. Tasks on
    #: other machines get them.
    from_environment: Callable[[str, Mapping[str, str]], Mapping[str, str]] = lambda root, options: {}
    #: False where a root does not show the files of roots below it, so that no folder can be taken for a root.
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


def open_storage(root_uri: str, storage_options: Mapping[str, str] | None = None) -> Storage:
    """Open the storage of a normalized root URI (FORMAT.md, L1), wrapped in retries.

    Opening touches no file and sends no request. If telemetry is enabled, the storage reports its requests.

    Args:
        root_uri: a root such as ``file:///folder/`` or ``s3://bucket/prefix/``.
        storage_options: the options of its scheme and ``COMMON_OPTIONS`` (docs/storages/README.md). ``SCHEME.NAME`` is
            the option of that name for one scheme; those of other schemes are for other roots.

    Raises:
        InvalidLocationError: for a root of another scheme or form. The message repeats no credentials.
        InvalidInputError: for an option that is unknown or has a wrong value. The message repeats no credentials.
        MissingExtraError: if the library of a client is missing.
    """
    scheme = scheme_of(root_uri)
    given = StorageOptions(storage_options)
    options = given.of_scheme(scheme.name)
    _check_names(scheme, options)
    for name in given:
        _check_other(name)
    for option in (*scheme.options, WHOLE_FILE_LIMIT):
        option.value(options)
    opened = scheme.open(root_uri, options)
    return RetryStorage(ObservedStorage(opened) if is_enabled() else opened)


def _check_names(scheme: Scheme, names: Iterable[str]) -> None:
    known = {option.name for option in (*scheme.options, *COMMON_OPTIONS)}
    if unknown := sorted(set(names) - known):
        supported = ", ".join(sorted(known))
        raise InvalidInputError(f"unknown storage option {unknown[0]!r}: {scheme.name}:// supports {supported}")


def _check_other(name: str) -> None:
    """Reject an option for roots of an unknown scheme. Options of other packages are checked when such a root opens."""
    scheme, dot, plain = name.partition(".")
    if dot and scheme in OWN_SCHEMES:
        _check_names(OWN_SCHEMES[scheme], [plain])
    elif dot and scheme not in _added():
        known = ", ".join(OWN_SCHEMES)
        raise InvalidInputError(
            f"unknown storage option {name!r}: the part before the dot is a scheme, such as {known}"
        )


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


_FSYNC = Option(
    "fsync",
    "before a call returns, the file, its folder, and the entries of its parent folders up to the root are on the"
    " device",
    Kind.FLAG,
    default=True,
)
_FOLLOW_LINKS = Option(
    "follow_links",
    "reads, writes and deletes follow symbolic links below the root, but not out of the folder of a table, unless they"
    " lead to an allowed root; 'false' rejects all links",
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
    # The client libraries take a good part of a second to load. Other roots should not pay for that.
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
        if azure.CLIENT.value(options) == "obstore":
            from trinitylake_ops.storage.azure.obstore_storage import ObstoreAzureStorage

            return ObstoreAzureStorage(root, options)
        from trinitylake_ops.storage.azure.blob_storage import AzureStorage

        return AzureStorage(root, options)


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
            place=("endpoint",),
            from_environment=s3.s3_of_environment,
        ),
        *(
            Scheme(
                name,
                azure.AZURE_OPTIONS,
                _open_azure,
                azure.AZURE_ENVIRONMENT,
                azure.AzureLocation.of,
                place=place,
                from_environment=azure.account_of_environment,
            )
            for name, place in (("abfss", ()), ("az", ("endpoint", "account_name")))
        ),
        Scheme(
            "gs",
            gcs.GCS_OPTIONS,
            _open_gcs,
            gcs.GCS_ENVIRONMENT,
            gcs.GcsLocation.of,
            place=("endpoint",),
            from_environment=gcs.gcs_of_environment,
        ),
        Scheme(
            "dynamodb",
            dynamodb.DYNAMODB_OPTIONS,
            _open_dynamodb,
            dynamodb.DYNAMODB_ENVIRONMENT,
            dynamodb.DynamoDBLocation.of,
            place=("endpoint",),
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
            place=("namenodes",),
        ),
    )
}
