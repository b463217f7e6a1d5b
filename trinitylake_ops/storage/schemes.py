"""All kinds of storage: our own, and those that other packages add (docs/storage.md, "Write a storage").

Another package adds one by an entry point of the group ``trinitylake_ops.storages``. The entry point has the name of
the scheme and leads to its :class:`~trinitylake_ops.storage.scheme.Scheme`. It is loaded when such a root is opened.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

from trinitylake_ops.errors import InvalidInputError, InvalidLocationError
from trinitylake_ops.extras import needs
from trinitylake_ops.storage.hdfs.settings import HDFS_ENVIRONMENT, HDFS_OPTIONS
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.storage.local.storage import LocalStorage
from trinitylake_ops.storage.memory import MemoryStorage
from trinitylake_ops.storage.options import StorageOptions, whole_file_limit_bytes
from trinitylake_ops.storage.s3.settings import S3_CLIENTS, S3_ENVIRONMENT, S3_OPTIONS
from trinitylake_ops.storage.scheme import Scheme

ENTRY_POINTS = "trinitylake_ops.storages"

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,15}")


def scheme_of(root_uri: str) -> Scheme:
    """Return the kind of storage of a root.

    Raises InvalidLocationError for a scheme that is not known, without repeating what may be a credential. Raises
    InvalidInputError where another package does not give what its entry point promises.
    """
    name, separator, _ = root_uri.partition("://")
    if separator and name in _OWN:
        return _OWN[name]
    others = _added()
    if separator and name in others:
        return _loaded(others[name])
    # The text there may be no scheme at all, but a credential in the wrong place.
    shown = f"the scheme {name!r}" if _SCHEME.fullmatch(name) else "this scheme"
    shown = shown if separator else "a root without a scheme"
    *first, last = (f"{known}://" for known in (*_OWN, *sorted(others)))
    raise InvalidLocationError(f"{shown} is not supported: roots start with {', '.join(first)} or {last}")


def environment_of(root_uri: str) -> tuple[str, ...]:
    """Return the variables that decide where a root is and who asks, if its options do not. None of an unknown one."""
    try:
        return scheme_of(root_uri).environment
    except InvalidLocationError:
        return ()


def _added() -> Mapping[str, EntryPoint]:
    """Return the entry points of other packages by their schemes. None of them takes the place of our own."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS) if point.name not in _OWN}


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
    limit_bytes = whole_file_limit_bytes(options)
    return LocalStorage(root, fsync=options.flag("fsync", default=True), whole_file_limit_bytes=limit_bytes)


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


_OWN: Mapping[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("file", frozenset({"fsync"}), _open_local),
        Scheme("memory", frozenset(), _open_memory),
        Scheme("hdfs", HDFS_OPTIONS, _open_hdfs, HDFS_ENVIRONMENT),
        Scheme("s3", S3_OPTIONS, _open_s3, S3_ENVIRONMENT),
    )
}
