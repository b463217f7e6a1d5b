"""Decide which locations named by lakehouse content may be read.

See docs/internals/protocol.md, "Which locations may be read".

Anyone with write access to a lakehouse can put any location into a pointer, a definition or a manifest. Content is
therefore untrusted and never decides which files are read: every location must be allowed by this module.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Self

from trinitylake_ops.errors import InvalidInputError, InvalidLocationError, LocationNotAllowedError
from trinitylake_ops.format.definitions import LakehouseDef, SourceRecord
from trinitylake_ops.format.file_names import TABLES_PREFIX, is_immutable_path
from trinitylake_ops.format.locations import as_uri, is_uri, normalize_root_uri

_LOCAL_SCHEMES = frozenset({"file", "memory"})
_TABLE_FILE = re.compile(rf"{TABLES_PREFIX}[^/]+/.+", re.DOTALL)
#: The root of any lakehouse, followed by the path of a table's file.
_REMOTE_TABLE_FILE = re.compile(rf"([A-Za-z][A-Za-z0-9+.-]*://.*?/)({TABLES_PREFIX}[^/]+/.+)", re.DOTALL)
#: Like ``_REMOTE_TABLE_FILE``, but with a table id of our form. Tried first, because a root itself may end in
#: ``tables/``.
_REMOTE_FILE = re.compile(
    rf"([A-Za-z][A-Za-z0-9+.-]*://.*?/)({TABLES_PREFIX}[0-9a-f]{{8}}(?:-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}}/.+)",
    re.DOTALL,
)
_TABLE_FOLDER = re.compile(rf"(.*?/{TABLES_PREFIX}[^/]+/|.*/)(?:metadata|data)/.*", re.DOTALL)
_MAX_SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True)
class FileAddress:
    """The root under which a file is read, and its path relative to that root."""

    #: The normalized URI of the root.
    root: str
    #: The path relative to the root.
    path: str
    #: Whether lakehouse content names a former location of the file. The file is read at this address instead.
    is_moved: bool = False
    #: Whether files under this root may be written and deleted.
    is_writable: bool = False


class NamedRoots:
    """The roots that the definitions of one lakehouse name.

    The roots are recorded when definitions are read, and are shared by all readers. Under these roots, only files whose
    names have the form of lakehouse files may be read. Thread-safe.

    Args:
        table_roots: The table root of the latest version that was read, if any.
        sources: The roots of the source lakehouses of a copy, in order.
        targets: The roots of exports.
        lakehouse_id: The id of the lakehouse, if its definitions name any root.
        claimed: Ids of tables whose folders are known to contain the owner file of the lakehouse, and table roots that
            are known to list the lakehouse as a user.
        version: The latest version whose definition was read, -1 if none.
    """

    def __init__(
        self,
        table_roots: tuple[str, ...] = (),
        sources: tuple[str, ...] = (),
        targets: tuple[str, ...] = (),
        lakehouse_id: str = "",
        claimed: frozenset[str] = frozenset(),
        version: int = -1,
    ):
        self._lock = threading.Lock()
        self.table_roots = table_roots
        self.sources = sources
        self.targets = targets
        self.lakehouse_id = lakehouse_id
        self.claimed = claimed
        self._version = version
        self._is_fixed = False

    def __reduce__(self) -> tuple[object, ...]:
        roots = (self.table_roots, self.sources, self.targets)
        return (NamedRoots, (*roots, self.lakehouse_id, self.claimed, self._version))

    @classmethod
    def of(cls, definition: LakehouseDef) -> Self:
        """Return the roots of one definition. Later calls of :meth:`note` do not change them."""
        names = cls()
        names.note(definition)
        names._is_fixed = True
        return names

    def note(self, definition: LakehouseDef, version: int | None = None) -> None:
        """Add the roots that a definition names: the sources of a copy, the targets of exports, and the table root.

        Only the latest version that was read determines the table root, because tables may have been moved after other
        versions.

        Args:
            definition: The definition of the lakehouse.
            version: The version of the definition; None for the latest version.
        """
        sources = [record.root for record in definition.sources]
        targets = [record.target_uri for record in definition.exports if record.target_uri]
        if self._is_fixed:
            return
        with self._lock:
            is_latest = version is None or version >= self._version
            self._version = max(self._version, 0 if version is None else version)
            if not sources and not targets and not definition.table_root and not self.table_roots:
                return
            if is_latest:
                self.table_roots = _with_roots((), [definition.table_root] if definition.table_root else [])
            self.sources = _with_roots(self.sources, sources)
            self.targets = _with_roots(self.targets, targets)
            self.lakehouse_id = definition.id

    @property
    def is_known(self) -> bool:
        """Whether the definition of any version was read, so that a table root would be known."""
        return self._version >= 0

    @property
    def is_copy(self) -> bool:
        """Whether the lakehouse was created from versions of other lakehouses and reads their files."""
        return bool(self.sources)

    def note_claimed(self, table_id: str) -> None:
        """Record a table whose folder has the lakehouse's owner file, or a table root that lists the lakehouse."""
        with self._lock:
            self.claimed |= {table_id}


def _with_roots(roots_before: tuple[str, ...], named: Iterable[str]) -> tuple[str, ...]:
    roots = list(roots_before)
    for uri in named:
        try:
            root = normalize_root_uri(uri)
        except InvalidLocationError:  # an invalid root allows no file, and is rejected when it is used
            continue
        if root not in roots:
            roots.append(root)
    return tuple(roots)


@dataclass(frozen=True, slots=True)
class AllowedRoots:
    """The roots below which files may be read in addition to the root of the lakehouse."""

    #: The root of the lakehouse.
    root: str
    #: Roots that lakehouse content names. Only files whose names have the form of lakehouse files may be read there,
    #: and local files only if the lakehouse itself is local.
    names: NamedRoots
    #: Roots that the operator allows. All files below them may be read and written.
    allowed: tuple[str, ...] = ()
    #: Roots that the caller passed. All files below them may be read.
    passed_roots: tuple[str, ...] = ()
    #: Whether a table file of any other lakehouse is resolved to the same path in this lakehouse. After a lakehouse is
    #: copied by copying its files, its content still contains the former locations.
    follows_moves: bool = True
    #: Returns whether the folder that a URI refers to can be a root on its storage.
    roots_nest: Callable[[str], bool] = lambda uri: True

    def strict(self) -> AllowedRoots:
        """Return the same roots with ``follows_moves`` disabled."""
        return replace(self, follows_moves=False)

    def find(self, location: str) -> FileAddress:
        """Resolve the URI of a file to the address where it is read.

        Raises:
            InvalidLocationError: The location is not a URI.
            LocationNotAllowedError: The file may not be read.
        """
        uri = as_uri(location)
        if not is_uri(uri):
            raise InvalidLocationError(f"{_shown(location)} is not a URI", path=cut(location))
        return self.known(uri) or self._moved(uri) or self._not_allowed_error(uri)

    def known(self, location: str) -> FileAddress | None:
        """Return the address of a location under a known root, None for any other location."""
        uri = as_uri(location)
        if uri.startswith(self.root):
            return FileAddress(self.root, uri.removeprefix(self.root), is_writable=True)
        for root in self.passed_roots:
            if uri.startswith(root):
                return FileAddress(root, uri.removeprefix(root))
        for root in self.names.table_roots:  # checked first, because an allowed root may contain them
            path = uri.removeprefix(root)
            if path != uri and _TABLE_FILE.fullmatch(path) and (self.may_be_named(root) or self.is_allowed(root)):
                return FileAddress(root, path, is_writable=True)
        for root in self.allowed:
            if uri.startswith(root):
                return FileAddress(root, uri.removeprefix(root), is_writable=True)
        return self._named(uri)

    def is_allowed(self, root: str) -> bool:
        """Whether the operator allows a root, or another root that contains it."""
        return any(root.startswith(allowed) for allowed in self.allowed)

    def is_file_of(self, address: FileAddress, table_id: str, *, is_managed: bool) -> bool:
        """Whether a table may use a readable file.

        Within the folders of tables, under any root that belongs to the lakehouse, a table may only use files of its
        own folder. Outside of these folders, a MANAGED table may only use files below a root that the operator allows.

        Args:
            address: The address of the file, as returned by :meth:`find`.
            table_id: The id that names the folder of the table; empty for a table without a folder.
            is_managed: Whether the table is MANAGED.
        """
        uri = address.root + address.path
        folder_id = self.folder_id(uri)
        if folder_id is not None:
            return folder_id == table_id and ".." not in address.path.split("/")
        return not is_managed or self.is_allowed(uri)

    def folder_id(self, uri: str) -> str | None:
        """Return the id of the table whose folder contains a URI, None for a URI outside the folders of tables."""
        roots = (self.root, *self.names.table_roots, *self.names.sources, *self.names.targets, *self.passed_roots)
        for root in roots:
            if uri.startswith(root) and _TABLE_FILE.fullmatch(path := uri.removeprefix(root)):
                return path.split("/")[1]
        return None

    def _named(self, uri: str) -> FileAddress | None:
        for root in (*self.names.sources, *self.names.targets):
            path = uri.removeprefix(root)
            if path != uri and self.may_be_named(root) and (_TABLE_FILE.fullmatch(path) or is_immutable_path(path)):
                return FileAddress(root, path)
        return None

    def in_sources(self, moved: FileAddress) -> list[FileAddress]:
        """Return the possible addresses of a moved file in the sources, because a source may itself have been moved."""
        return [FileAddress(root, moved.path) for root in self.names.sources if self.may_be_named(root)]

    def may_be_named(self, root: str) -> bool:
        """Whether content may name this root. Only a lakehouse on this machine may name a root on this machine."""
        is_local = root.partition("://")[0] in _LOCAL_SCHEMES
        return not is_local or self.root.partition("://")[0] in _LOCAL_SCHEMES

    def check_root(self, root: str) -> None:
        """Raise LocationNotAllowedError if content may not name this root of another lakehouse."""
        is_known = self.is_allowed(root) or any(root.startswith(passed) for passed in self.passed_roots)
        if not self.may_be_named(root) and not is_known:
            self._not_allowed_error(root)

    def _moved(self, uri: str) -> FileAddress | None:
        if not self.follows_moves:
            return None
        match = _in_another_lakehouse(uri)
        return FileAddress(self.root, match[2], is_moved=True) if match else None

    def _root_to_allow(self, uri: str) -> str:
        """Describe the narrowest root that contains a file."""
        if self.roots_nest(uri):
            match = _TABLE_FOLDER.fullmatch(uri)
            return f"a root that contains it, such as {_shown(match[1] if match else uri[: uri.rindex('/') + 1])}"
        root = root_of_table_file(uri)
        return "the root of the lakehouse that contains it" + (f", such as {_shown(root)}" if root else "")

    def _not_allowed_error(self, uri: str) -> FileAddress:
        raise LocationNotAllowedError(
            f"access to {_shown(uri)} is not allowed: it is outside the lakehouse at {self.root}; if you trust all"
            f" writers of this lakehouse with access to it, allow {self._root_to_allow(uri)}, by --allow-root,"
            " TRINITYLAKE_ALLOWED_ROOTS or the storage option 'allowed_roots'",
            path=cut(uri),
        )


def root_of_table_file(uri: str) -> str | None:
    """Return the root of the lakehouse that contains a table file, derived from the file's URI; None for other URIs."""
    match = _in_another_lakehouse(uri)
    return match[1] if match else None


def _in_another_lakehouse(uri: str) -> re.Match[str] | None:
    return _REMOTE_FILE.fullmatch(uri) or _REMOTE_TABLE_FILE.fullmatch(uri)


def allowed_roots(text: str) -> tuple[str, ...]:
    """Parse the whitespace-separated roots that the operator allows. Raise InvalidInputError for an invalid root."""
    roots = []
    for uri in text.split():
        try:
            roots.append(normalize_root_uri(uri))
        except InvalidLocationError as error:
            raise InvalidInputError(f"the option 'allowed_roots' is invalid: {error.message}") from error
    return tuple(dict.fromkeys(roots))


def sources_of_copy(root: str, source: LakehouseDef, version: int) -> tuple[SourceRecord, ...]:
    """Return the source records of a lakehouse that is created from another one without copying all of its files.

    Args:
        root: The root of the other lakehouse.
        source: The definition of the other lakehouse.
        version: The version that is copied.
    """
    copied = SourceRecord(root=root, lakehouse_id=source.id, version=version)
    table_root = (normalize_root_uri(source.table_root),) if source.table_root else ()
    roots = {record.root: record for record in source.sources}
    roots.update((uri, replace(copied, root=uri)) for uri in table_root)
    return (copied, *(record for uri, record in roots.items() if uri != root))


def cut(text: str) -> str:
    """Truncate a location for an error message, because content can contain locations of any length."""
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


def _shown(text: str) -> str:
    return repr(cut(text))
