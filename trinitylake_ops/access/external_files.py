"""Read files outside a lakehouse's root by their URIs, if ``access/allowed_roots.py`` allows it."""

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
from trinitylake_ops.storage.opening import open_storage, with_environment
from trinitylake_ops.storage.options import ALLOWED_ROOTS, StorageOptions
from trinitylake_ops.storage.parallel import in_one_round_trip, run_parallel
from trinitylake_ops.storage.registry import roots_nest

#: Loads the latest lakehouse definition; returns None if there is none.
DefinitionLoader = Callable[[], LakehouseDef | None]

#: Maximum number of unknown roots for which the latest definition is loaded: content can name any number of roots.
_MAX_PROBES = 8


class ExternalStorages:
    """Opens storages outside a lakehouse's root on first use, and reads files from them.

    Thread-safe. Pickled copies lose ``load_definition`` and ``own``.

    Args:
        root: The root of the lakehouse.
        storage_options: Options for storages with the same scheme. A storage with another scheme gets only the options
            for its scheme, and reads other settings from the environment.
        names: The roots that definitions of the lakehouse name.
        opened: Storages that are already open.
        load_definition: Called once for each unknown root, before a location below it is rejected.
        follows_moves: See :class:`AllowedRoots`.
        own: The storage of the root, used to locate moved files.
    """

    def __init__(
        self,
        root: str,
        storage_options: StorageOptions,
        names: NamedRoots | None = None,
        opened: Sequence[Storage] = (),
        load_definition: DefinitionLoader | None = None,
        *,
        follows_moves: bool = True,
        own: Storage | None = None,
    ):
        self.names = names or NamedRoots()
        self.options = storage_options
        self._opened = list(opened)
        self._load_definition = load_definition
        self._own = own
        #: Whether a file was read whose location in lakehouse content is a former location of the lakehouse.
        self.has_moved = False
        self._address_cache: dict[str, FileAddress] = {}
        self._has_owner: dict[str, bool] = {}
        self._is_claimed: dict[str, bool] = {}
        allowed = allowed_roots(storage_options.get(ALLOWED_ROOTS, ""))
        passed = tuple(storage.root for storage in opened)
        self.allowed_roots = AllowedRoots(root, self.names, allowed, passed, follows_moves, roots_nest)
        self._storages: dict[str, Storage] = {}
        self.after_fork_in_child()
        at_fork(self)

    def after_fork_in_child(self) -> None:
        """Replace the locks: a forked child does not have the threads that held them."""
        self._lock = threading.Lock()
        self._loading_lock = threading.RLock()  # reentrant: the definition itself may be outside the root
        self._is_loading = False
        self._loaded_roots: set[str] = set()

    def __reduce__(self) -> tuple[object, ...]:
        # The process that unpickles the copy may have another environment, but must read the same files.
        options = with_environment(self.allowed_roots.root, self.options)
        return (
            _reopen,
            (self.allowed_roots.root, options, self.names, tuple(self._opened), self.allowed_roots.follows_moves),
        )

    def register_storage(self, storage: Storage) -> None:
        """Read the files under the root of a storage through it, with its own options."""
        self._opened.append(storage)
        passed_roots = (*self.allowed_roots.passed_roots, storage.root)
        self.allowed_roots = replace(self.allowed_roots, passed_roots=passed_roots)

    def find(self, uri: str) -> FileAddress:
        """Resolve a URI to the address where the file is read.

        A file of a moved table is read at its current address, which may be under the table root. In a copy that has
        sources, the file may be missing at this address. In this case, it is read from the first source that contains
        the file, because a source may have been moved before it was copied.

        Raises:
            InvalidLocationError: The location is not a URI.
            LocationNotAllowedError: The file may not be read.
            StorageError: A request to determine the address failed.
        """
        address = self.locate(uri)
        return self._locate_moved(address) if address.is_moved else address

    def locate(self, uri: str) -> FileAddress:
        """Resolve a URI to an address without checking that the file exists.

        Raises the errors of :meth:`find`.
        """
        address = self.allowed_roots.known(uri)
        if address is None:
            self._load_definition_at(uri.partition(f"/{TABLES_PREFIX}")[0])
            address = self.allowed_roots.find(uri)
        if address.is_moved:
            return replace(address, root=self.home_of(address.path.split("/")[1]))
        if self._is_left_behind(address):
            return FileAddress(self.allowed_roots.root, address.path, is_moved=True)
        return address

    def _is_left_behind(self, address: FileAddress) -> bool:
        """Whether a file under a table root belongs to a table whose folder and owner file are under our root.

        This is the case in a copy of a lakehouse whose table root was its own root. If the table root was claimed for
        this lakehouse, its files are under the table root. The check takes one request per table, and the result is
        cached.
        """
        if address.root not in self.names.table_roots or not self._has_owner_file(address.path.split("/")[1]):
            return False
        if address.root not in self._is_claimed:
            users = users_of(self.storage_of(address), self.names.lakehouse_id)
            self._is_claimed[address.root] = any(user.frees and user.root == self.allowed_roots.root for user in users)
        return not self._is_claimed[address.root]

    def _has_owner_file(self, table_id: str) -> bool:
        """Whether the folder of a table under our root has an owner file. The result is cached."""
        if self._own is None or table_id in (".", ".."):
            return False
        if table_id not in self._has_owner:
            self._has_owner[table_id] = self._own.exists(owner_path(table_id))
        return self._has_owner[table_id]

    def home_of(self, table_id: str) -> str:
        """Return the root that contains the folder of a MANAGED table, regardless of the table's metadata.

        This is the root of the lakehouse if the owner file is there, otherwise the table root, if any. Raises
        StorageError if a request fails.
        """
        roots = self.table_roots()
        return roots[0] if roots and not self._has_owner_file(table_id) else self.allowed_roots.root

    def _locate_moved(self, moved: FileAddress) -> FileAddress:
        """Return the address of a moved file. Each candidate takes one request. The result is cached."""
        others = self.allowed_roots.in_sources(moved)
        if not others:
            return moved
        address = self._address_cache.get(moved.path)
        if address is None:
            validate_path(moved.path)
            candidates = (moved, *others)
            address = next((each for each in candidates if self.storage_of(each).exists(each.path)), None)
            if address is None:
                return moved
            self._address_cache[moved.path] = address
        return address

    def table_roots(self) -> tuple[str, ...]:
        """Return the table roots that definitions name, if content may name them. Raises StorageError."""
        if not self.names.is_known:
            self._load_definition_at("")
        return tuple(root for root in self.names.table_roots if self.allowed_roots.may_be_named(root))

    def _load_definition_at(self, root: str) -> None:
        """Load the latest definition once for each unknown root, because tables may have been moved to that root.

        Other threads wait in the meantime: without the named roots, all files would be resolved to this lakehouse.
        """
        with self._loading_lock:
            is_done = root in self._loaded_roots or len(self._loaded_roots) == _MAX_PROBES
            # Files that the loader itself reads are resolved without the definition.
            if self._load_definition is None or is_done or self._is_loading:
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
        """Return the storage that contains an address, opening it on first use."""
        if self._own is not None and self._own.root == place.root:
            return self._own
        for storage in self._opened:
            if storage.root == place.root:
                return storage
        with self._lock:
            external = self._storages.get(place.root)
            if external is None:
                options = self.options.beyond(self.allowed_roots.root, place.root)
                external = self._storages[place.root] = open_storage(place.root, options)
        return external

    def read(self, uri: str) -> bytes:
        """Read a node or definition.

        Raises:
            InvalidLocationError: The location is not a URI.
            LocationNotAllowedError: The file may not be read.
            StorageError: The read failed, for example FileMissingError.
        """
        address = self.find(uri)
        return self.storage_of(address).read(address.path)

    def read_available(self, uris: Sequence[str]) -> list[bytes | StorageError]:
        """Read several files in parallel. Return an error instead of the content for each file that cannot be read."""

        def read_or_error(uri: str) -> bytes | StorageError:
            try:
                return self.read(uri)
            except InvalidLocationError as error:
                return StorageError(error.message, path=uri)
            except StorageError as error:
                return error

        return run_parallel(in_one_round_trip(read_or_error), uris, Storage.concurrency)


def _reopen(
    root: str, storage_options: StorageOptions, names: NamedRoots, opened: tuple[Storage, ...], follows_moves: bool
) -> ExternalStorages:
    return ExternalStorages(root, storage_options, names, opened, follows_moves=follows_moves)
