"""Decides which files may be read that a lakehouse's content names (docs/protocol.md, "Which places may be read").

Anyone who can write into a lakehouse can put any location into a pointer, a definition or a manifest. So content never
decides by itself what is read: a location must lie where this module says.
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
#: A lakehouse's root, and the path there of a table's file.
_FAR_TABLE_FILE = re.compile(rf"([A-Za-z][A-Za-z0-9+.-]*://.*?/)({TABLES_PREFIX}[^/]+/.+)", re.DOTALL)
#: The same with an id that we give. It comes first, as a root may end in ``tables/`` itself.
_FAR_FILE_OF_OURS = re.compile(
    rf"([A-Za-z][A-Za-z0-9+.-]*://.*?/)({TABLES_PREFIX}[0-9a-f]{{8}}(?:-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}}/.+)",
    re.DOTALL,
)
_TABLE_FOLDER = re.compile(rf"(.*?/{TABLES_PREFIX}[^/]+/|.*/)(?:metadata|data)/.*", re.DOTALL)
_LONGEST_SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True)
class FileAddress:
    """A file, given by the root under which it is read, and its path there.

    ``is_moved`` says that content named another place, and that the file is read at its own. ``is_writable`` says that
    files may be written and deleted there.
    """

    root: str
    path: str
    is_moved: bool = False
    is_writable: bool = False


class NamedRoots:
    """The roots that definitions of one lakehouse name.

    They are noted as definitions are read, and shared by all readers. Only files with names that a lakehouse gives may
    be read there. ``table_roots`` has that of the latest version seen, if any. ``sources`` are those of a copy, in
    their order. ``targets`` are roots of exports. ``lakehouse_id`` is its id, where it names any. ``claimed`` are the
    ids of tables whose folders are known to have its owner file, and the roots of such folders that know this user.
    Safe to use from several threads.
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
        """Return those of one definition, which no other one changes."""
        names = cls()
        names.note(definition)
        names._is_fixed = True
        return names

    def note(self, definition: LakehouseDef, version: int | None = None) -> None:
        """Add the roots that the definition of a version names: sources of a copy, targets of exports, its table root.

        The latest version seen says where the table root is: tables may have been moved since the others. None stands
        for the latest of all.
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
        """Whether the definition of a version was seen, so that a table root would be known."""
        return self._version >= 0

    @property
    def is_copy(self) -> bool:
        """Whether the lakehouse was made of versions of other lakehouses, whose files it reads."""
        return bool(self.sources)

    def note_claimed(self, table_id: str) -> None:
        """Note that the folder of a table has the owner file of the lakehouse, or a table root the file of its user."""
        with self._lock:
            self.claimed |= {table_id}


def _with_roots(known: tuple[str, ...], named: Iterable[str]) -> tuple[str, ...]:
    roots = list(known)
    for uri in named:
        try:
            root = normalize_root_uri(uri)
        except InvalidLocationError:  # such a root is of no use, and is refused where it is used
            continue
        if root not in roots:
            roots.append(root)
    return tuple(roots)


@dataclass(frozen=True, slots=True)
class AllowedRoots:
    """The places that may be read beyond the root of a lakehouse.

    ``given`` are roots that a caller passed, and ``allowed`` are the operator's. All files below them may be read, and
    below ``allowed`` also written. ``names`` are the roots that content names. There, only names that a lakehouse gives
    count, and a local file only for a local lakehouse. With ``follows_moves``, a table's file of any other lakehouse is
    taken for the file of the same path here. A copy of all files leaves such names. ``roots_nest`` tells
    of a URI whether its folder may be taken for a root.
    """

    root: str
    names: NamedRoots
    allowed: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    follows_moves: bool = True
    roots_nest: Callable[[str], bool] = lambda uri: True

    def strict(self) -> AllowedRoots:
        """Return the same places, without taking any file for one of the same path here."""
        return replace(self, follows_moves=False)

    def find(self, location: str) -> FileAddress:
        """Return where a location, a URI, is read. Raises InvalidLocationError, LocationNotAllowedError."""
        uri = as_uri(location)
        if not is_uri(uri):
            raise InvalidLocationError(f"{_shown(location)} is no URI", path=cut(location))
        return self.known(uri) or self._moved(uri) or self._not_allowed_error(uri)

    def known(self, location: str) -> FileAddress | None:
        """Return where a location under a known root is read, None for any other."""
        uri = as_uri(location)
        if uri.startswith(self.root):
            return FileAddress(self.root, uri.removeprefix(self.root), is_writable=True)
        for root in self.given:
            if uri.startswith(root):
                return FileAddress(root, uri.removeprefix(root))
        for root in self.names.table_roots:  # before allowed ones, which may hold it: writers leave word there
            path = uri.removeprefix(root)
            if path != uri and _TABLE_FILE.fullmatch(path) and (self.may_be_named(root) or self.is_allowed(root)):
                return FileAddress(root, path, is_writable=True)
        for root in self.allowed:
            if uri.startswith(root):
                return FileAddress(root, uri.removeprefix(root), is_writable=True)
        return self._named(uri)

    def is_allowed(self, root: str) -> bool:
        """Whether the operator allows a root, or one that holds it."""
        return any(root.startswith(known) for known in self.allowed)

    def is_file_of(self, place: FileAddress, table_id: str, *, is_managed: bool) -> bool:
        """Whether a table may have a file at a place that may be read.

        In the folders of tables, under any root that belongs to the lakehouse, a table has the files of its own folder
        only. Elsewhere a MANAGED table has only files below a root that the operator allows.

        Args:
            place: The place of the file, as :meth:`find` returns it.
            table_id: The id that names the folder of the table, empty for a table without one.
            is_managed: Whether the table is MANAGED.
        """
        uri = place.root + place.path
        folder_id = self.folder_id(uri)
        if folder_id is not None:
            return folder_id == table_id and ".." not in place.path.split("/")
        return not is_managed or self.is_allowed(uri)

    def folder_id(self, uri: str) -> str | None:
        """Return the id of the table of the lakehouse in whose folder a URI lies, None for any other URI."""
        own = (self.root, *self.names.table_roots, *self.names.sources, *self.names.targets, *self.given)
        for root in own:
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
        """Return where else a table's file may be that is not at its own place. A source may have been moved, too."""
        return [FileAddress(root, moved.path) for root in self.names.sources if self.may_be_named(root)]

    def may_be_named(self, root: str) -> bool:
        """Whether content may name this root. Only a lakehouse on this machine may name a root of this machine."""
        is_local = root.partition("://")[0] in _LOCAL_SCHEMES
        return not is_local or self.root.partition("://")[0] in _LOCAL_SCHEMES

    def check_root(self, root: str) -> None:
        """Raise LocationNotAllowedError for the root of another lakehouse that content may not name."""
        is_known = self.is_allowed(root) or any(root.startswith(known) for known in self.given)
        if not self.may_be_named(root) and not is_known:
            self._not_allowed_error(root)

    def _moved(self, uri: str) -> FileAddress | None:
        if not self.follows_moves:
            return None
        match = _in_another_lakehouse(uri)
        return FileAddress(self.root, match[2], is_moved=True) if match else None

    def _root_to_allow(self, uri: str) -> str:
        """Say which root has a file, as small as it may be."""
        if self.roots_nest(uri):
            match = _TABLE_FOLDER.fullmatch(uri)
            return f"a root that holds it, such as {_shown(match[1] if match else uri[: uri.rindex('/') + 1])}"
        root = root_of_table_file(uri)
        return "the root of the lakehouse that has it" + (f", such as {_shown(root)}" if root else "")

    def _not_allowed_error(self, uri: str) -> FileAddress:
        raise LocationNotAllowedError(
            f"{_shown(uri)} lies beyond the lakehouse at {self.root}, which alone does not make it readable; if you"
            f" trust whoever writes this lakehouse with it, allow {self._root_to_allow(uri)};"
            " --allow-root, TRINITYLAKE_ALLOWED_ROOTS and the storage option 'allowed_roots' do so",
            path=cut(uri),
        )


def root_of_table_file(uri: str) -> str | None:
    """Return the root of the lakehouse that has a table's file, by the file's path. None where it does not tell."""
    match = _in_another_lakehouse(uri)
    return match[1] if match else None


def _in_another_lakehouse(uri: str) -> re.Match[str] | None:
    return _FAR_FILE_OF_OURS.fullmatch(uri) or _FAR_TABLE_FILE.fullmatch(uri)


def allowed_roots(text: str) -> tuple[str, ...]:
    """Return the roots that the operator allows, from an option's text. Raises InvalidInputError."""
    roots = []
    for uri in text.split():
        try:
            roots.append(normalize_root_uri(uri))
        except InvalidLocationError as error:
            raise InvalidInputError(f"the option 'allowed_roots': {error.message}") from error
    return tuple(dict.fromkeys(roots))


def sources_of_copy(root: str, source: LakehouseDef, version: int) -> tuple[SourceRecord, ...]:
    """Return the sources of a lakehouse that is made of a version of ``source`` without copying all of it."""
    own = SourceRecord(root=root, lakehouse_id=source.id, version=version)
    table_root = (normalize_root_uri(source.table_root),) if source.table_root else ()
    roots = {record.root: record for record in source.sources}
    roots.update((uri, replace(own, root=uri)) for uri in table_root)
    return (own, *(record for uri, record in roots.items() if uri != root))


def cut(text: str) -> str:
    """Return a location as errors quote it, cut to a bounded length: content can make it as long as it likes."""
    return text if len(text) <= _LONGEST_SHOWN_CHARS else f"{text[:_LONGEST_SHOWN_CHARS]}..."


def _shown(text: str) -> str:
    return repr(cut(text))
