"""Reading files beyond a lakehouse's root, by their URIs, where that is allowed (``access/allowed_roots.py``)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from trinitylake_ops.access.allowed_roots import AllowedRoots, FileAddress, NamedRoots, allowed_roots
from trinitylake_ops.access.table_owners import users_of
from trinitylake_ops.errors import InvalidLocationError, StorageError
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.file_names import TABLES_PREFIX, owner_path
from trinitylake_ops.format.locations import validate_path
from trinitylake_ops.storage.background import at_fork
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.storage.options import ALLOWED_ROOTS, StorageOptions
from trinitylake_ops.storage.parallel import in_one_round_trip, run_parallel
from trinitylake_ops.storage.registry import open_storage, roots_nest, with_environment

#: Returns the lakehouse definition if none was noted so far, None if there is none.
DefinitionLoader = Callable[[], LakehouseDef | None]

#: Content can name any number of roots. For so many of them the latest definition is looked up.
_MOST_PROBES = 8


class ExternalStorages:
    """Opens the storages of places beyond a root, each at its first use, and reads from them.

    Options are handed on to a storage of the same scheme. One of another scheme gets those with its scheme, and looks
    for others in the environment. ``names`` are the roots that definitions name. Before a place that none of them names
    is refused, ``load_definition`` is called once for its root. ``given`` are open storages that a caller passed.
    ``own`` is the storage of the root; it tells where a moved file is. Safe to use from several threads; pickles
    without ``load_definition`` and ``own``.
    """

    def __init__(
        self,
        root: str,
        storage_options: StorageOptions,
        names: NamedRoots | None = None,
        given: Sequence[Storage] = (),
        load_definition: DefinitionLoader | None = None,
        *,
        follows_moves: bool = True,
        own: Storage | None = None,
    ):
        self.names = names or NamedRoots()
        self._options = storage_options
        self._given = list(given)
        self._load_definition = load_definition
        self._own = own
        #: Whether any file was read that content names at a former place of the lakehouse.
        self.has_moved = False
        self._located: dict[str, FileAddress] = {}
        self._has_owner: dict[str, bool] = {}
        self._is_claimed: dict[str, bool] = {}
        allowed = allowed_roots(storage_options.get(ALLOWED_ROOTS, ""))
        passed = tuple(storage.root for storage in given)
        self.allowed_roots = AllowedRoots(root, self.names, allowed, passed, follows_moves, roots_nest)
        self._storages: dict[str, Storage] = {}
        self.after_fork_in_child()
        at_fork(self)

    def after_fork_in_child(self) -> None:
        """Make new locks: a forked child does not have the threads that held them."""
        self._lock = threading.Lock()
        self._loading_lock = threading.RLock()  # what is looked up may itself be elsewhere
        self._is_loading = False
        self._loaded_roots: set[str] = set()

    def __reduce__(self) -> tuple[object, ...]:
        # Whoever gets the copy may have another environment, and reads the same files.
        options = with_environment(self.allowed_roots.root, self._options)
        return (
            _reopened,
            (self.allowed_roots.root, options, self.names, tuple(self._given), self.allowed_roots.follows_moves),
        )

    def register_storage(self, storage: Storage) -> None:
        """Read the files under the root of a storage through it, with its own options."""
        self._given.append(storage)
        given = (*self.allowed_roots.given, storage.root)
        self.allowed_roots = replace(self.allowed_roots, given=given)

    def find(self, uri: str) -> FileAddress:
        """Return where a URI is read. Raises InvalidLocationError, LocationNotAllowedError, StorageError.

        A file of a moved table is read at its own place, which may be under the table root. In a copy that has sources,
        the file may be missing there. It is then read in the first source that has it. A source may have been moved
        before it was copied.
        """
        place = self.locate(uri)
        return self._locate_moved(place) if place.is_moved else place

    def locate(self, uri: str) -> FileAddress:
        """Return the place of a URI, whether or not there is a file. A moved file has its own place.

        Raises what :meth:`find` does.
        """
        place = self.allowed_roots.known(uri)
        if place is None:
            self._load_definition_at(uri.partition(f"/{TABLES_PREFIX}")[0])
            place = self.allowed_roots.find(uri)
        if place.is_moved:
            return replace(place, root=self.home_of(place.path.split("/")[1]))
        return FileAddress(self.allowed_roots.root, place.path, is_moved=True) if self._is_left_behind(place) else place

    def _is_left_behind(self, place: FileAddress) -> bool:
        """Whether a file under a table root belongs to a table that is under the own root, with its owner file.

        This happens in a copy of a lakehouse whose table root was its own root. It takes one request for each table,
        once. Where the table root was made that of this lakehouse, its files are there.
        """
        if place.root not in self.names.table_roots or not self._has_owner_file(place.path.split("/")[1]):
            return False
        if place.root not in self._is_claimed:
            users = users_of(self.storage_of(place), self.names.lakehouse_id)
            self._is_claimed[place.root] = any(user.frees and user.root == self.allowed_roots.root for user in users)
        return not self._is_claimed[place.root]

    def _has_owner_file(self, table_id: str) -> bool:
        """Whether the folder of a table under the own root has an owner file. It is asked once."""
        if self._own is None or table_id in (".", ".."):
            return False
        if table_id not in self._has_owner:
            self._has_owner[table_id] = self._own.exists(owner_path(table_id))
        return self._has_owner[table_id]

    def home_of(self, table_id: str) -> str:
        """Return the root under which the folder of a MANAGED table is, whatever its metadata says.

        That is the own root if its owner file is there, else the table root, if there is one. Raises StorageError.
        """
        roots = self.table_roots()
        return roots[0] if roots and not self._has_owner_file(table_id) else self.allowed_roots.root

    def _locate_moved(self, moved: FileAddress) -> FileAddress:
        """Return the place of a moved file. It costs one request for each place asked. The result is remembered."""
        others = self.allowed_roots.in_sources(moved)
        if not others:
            return moved
        found = self._located.get(moved.path)
        if found is None:
            validate_path(moved.path)
            found = next((one for one in (moved, *others) if self.storage_of(one).exists(one.path)), None)
            if found is None:
                return moved
            self._located[moved.path] = found
        return found

    def table_roots(self) -> tuple[str, ...]:
        """Return the table roots that the lakehouse's definitions may name. Raises StorageError."""
        if not self.names.is_known:
            self._load_definition_at("")
        return tuple(root for root in self.names.table_roots if self.allowed_roots.may_be_named(root))

    def _load_definition_at(self, root: str) -> None:
        """Look up the latest definition, once for each root that nobody knew, as tables may have been moved there.

        Whoever comes meanwhile waits: without the names all files seem to be here.
        """
        with self._loading_lock:
            is_done = root in self._loaded_roots or len(self._loaded_roots) == _MOST_PROBES
            if self._load_definition is None or is_done or self._is_loading:  # what it reads itself is found without it
                return
            self._is_loading = True
            try:
                definition = self._load_definition()
            finally:
                self._is_loading = False
            if definition is not None:
                self.names.note(definition)
            self._loaded_roots.add(root)

    def storage_of(self, place: FileAddress) -> Storage:
        """Return the storage of a place."""
        if self._own is not None and self._own.root == place.root:
            return self._own
        for storage in self._given:
            if storage.root == place.root:
                return storage
        with self._lock:
            found = self._storages.get(place.root)
            if found is None:
                options = self._options.beyond(self.allowed_roots.root, place.root)
                found = self._storages[place.root] = open_storage(place.root, options)
        return found

    def read(self, uri: str) -> bytes:
        """Return the bytes of a node or definition.

        Raises FileMissingError, InvalidLocationError, LocationNotAllowedError, StorageError.
        """
        place = self.find(uri)
        return self.storage_of(place).read(place.path)

    def read_available(self, uris: Sequence[str]) -> list[bytes | StorageError]:
        """Read several files in parallel. A failure takes the place of the file's content instead of being raised."""

        def read_or_error(uri: str) -> bytes | StorageError:
            try:
                return self.read(uri)
            except InvalidLocationError as error:
                return StorageError(error.message, path=uri)
            except StorageError as error:
                return error

        return run_parallel(in_one_round_trip(read_or_error), uris, Storage.concurrency)


def _reopened(
    root: str, storage_options: StorageOptions, names: NamedRoots, given: tuple[Storage, ...], follows_moves: bool
) -> ExternalStorages:
    return ExternalStorages(root, storage_options, names, given, follows_moves=follows_moves)
