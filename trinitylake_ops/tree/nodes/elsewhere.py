"""Reading files beyond a lakehouse's root, by their URIs, where that is allowed (``format/places.py``)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from trinitylake_ops.errors import InvalidLocationError, StorageError
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.file_names import owner_path
from trinitylake_ops.format.locations import validate_path
from trinitylake_ops.format.places import NamedRoots, Place, Places, allowed_roots
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.storage.open import open_storage
from trinitylake_ops.storage.options import ALLOWED_ROOTS, StorageOptions
from trinitylake_ops.storage.parallel import in_one_round, run_parallel

#: Returns the lakehouse definition if none was noted so far, None if there is none.
LookUp = Callable[[], LakehouseDef | None]


class Elsewhere:
    """Opens the storages of places beyond a root, each at its first use, and reads from them.

    Options are handed on to a storage of the same scheme. A storage of another scheme finds its own in the environment.
    ``names`` are the roots that definitions name. Before a place that none of them names is refused, ``look_up`` is
    asked once. ``given`` are open storages that a caller passed. ``own`` is the storage of the root; it tells where a
    moved file is. Safe to use from several threads; pickles without ``look_up`` and ``own``.
    """

    def __init__(
        self,
        root: str,
        storage_options: StorageOptions,
        names: NamedRoots | None = None,
        given: Sequence[Storage] = (),
        look_up: LookUp | None = None,
        *,
        follows_moves: bool = True,
        own: Storage | None = None,
    ):
        self.names = names or NamedRoots()
        self._options = storage_options
        self._given = list(given)
        self._look_up = look_up
        self._own = own
        self._standing: dict[str, Place] = {}
        self._stands_here: dict[str, bool] = {}
        allowed = allowed_roots(storage_options.get(ALLOWED_ROOTS, ""))
        passed = tuple(storage.root for storage in given)
        self.places = Places(root, self.names, allowed, passed, follows_moves)
        self._storages: dict[str, Storage] = {}
        self._lock = threading.Lock()
        self._looking = threading.RLock()

    def __reduce__(self) -> tuple[object, ...]:
        state = (self.places.root, self._options, self.names, tuple(self._given), self.places.follows_moves)
        return (_reopened, state)

    def give(self, storage: Storage) -> None:
        """Read the files under the root of a storage through it, with its own options."""
        self._given.append(storage)
        given = (*self.places.given, storage.root)
        self.places = Places(
            self.places.root, self.names, self.places.allowed, given, follows_moves=self.places.follows_moves
        )

    def find(self, uri: str) -> Place:
        """Return where a URI is read. Raises InvalidLocationError, LocationNotAllowedError, StorageError.

        A file of a moved table is read at its own place. In a copy that has sources, the file may be missing there. It
        is then read in the first source that has it, as a source may have been moved before it was copied.
        """
        place = self.place_named(uri)
        return self._where_it_stands(place) if place.is_moved else place

    def place_named(self, uri: str) -> Place:
        """Return the place of a URI, whether or not there is a file. A moved file has its own place.

        Raises what :meth:`find` does.
        """
        place = self.places.known(uri)
        if place is None:
            self._look()
            place = self.places.find(uri)
        return Place(self.places.root, place.path, is_moved=True) if self._is_left(place) else place

    def _is_left(self, place: Place) -> bool:
        """Whether a file under a table root belongs to a table that is under the own root, with its owner file.

        This happens in a copy of a lakehouse whose table root was its own root. It takes one request for each table,
        once.
        """
        if self._own is None or place.root not in self.names.table_roots:
            return False
        table_id = place.path.split("/")[1]
        if table_id not in self._stands_here:
            self._stands_here[table_id] = self._own.exists(owner_path(table_id))
        return self._stands_here[table_id]

    def _where_it_stands(self, moved: Place) -> Place:
        """Return the place of a moved file. It costs one request for each place asked. The result is remembered."""
        others = self.places.in_sources(moved)
        if not others:
            return moved
        found = self._standing.get(moved.path)
        if found is None:
            validate_path(moved.path)
            found = next((one for one in (moved, *others) if self.storage_of(one).exists(one.path)), None)
            if found is None:
                return moved
            self._standing[moved.path] = found
        return found

    def table_roots(self) -> tuple[str, ...]:
        """Return the table roots that the lakehouse's definitions may name. Raises StorageError."""
        if not self.names.table_roots:
            self._look()
        return tuple(root for root in self.names.table_roots if self.places.may_be_named(root))

    def _look(self) -> None:
        """Note the roots that the definition names. Whoever asks meanwhile waits for them."""
        with self._looking:  # by one thread again, if the look itself reads beyond the root
            look_up, self._look_up = self._look_up, None
            definition = None if look_up is None else look_up()
            if definition is not None:
                self.names.note(definition)

    def storage_of(self, place: Place) -> Storage:
        """Return the storage of a place."""
        if self._own is not None and self._own.root == place.root:
            return self._own
        for storage in self._given:
            if storage.root == place.root:
                return storage
        with self._lock:
            found = self._storages.get(place.root)
            if found is None:
                options = self._options.beyond(self.places.root, place.root)
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

        return run_parallel(in_one_round(read_or_error), uris, Storage.concurrency)


def _reopened(
    root: str, storage_options: StorageOptions, names: NamedRoots, given: tuple[Storage, ...], follows_moves: bool
) -> Elsewhere:
    return Elsewhere(root, storage_options, names, given, follows_moves=follows_moves)
