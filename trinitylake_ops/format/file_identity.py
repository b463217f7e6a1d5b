"""Tells which names may mean the same file. Some file systems fold the case of letters, or normalise Unicode (L8).

A listing of such a file system may show another name than was written. Nearly all our names are in ASCII and in lower
case, which no file system changes. The others are identified by the uuid that each of our names holds.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

from trinitylake_ops.format.locations import is_uri

_UUID = re.compile("[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
#: One uuid, one file: nodes, definitions, roots of exports. Several of a table's files may share one.
_CATALOG_NAME = re.compile(rf"({_UUID.pattern})\.(?:arrow|ipc|binpb)", re.IGNORECASE)


def folded(text: str) -> str:
    """Return the part of a text that no case or normalisation changes: ASCII, in lower case, without marks."""
    if text.isascii():
        return text.lower()
    decomposed = unicodedata.normalize("NFD", text.casefold())
    return "".join(char for char in decomposed if char.isascii())


def name_identity(location: str) -> str:
    """Return the part of a location's last name that tells its file from all others.

    For a file of the catalog this is the uuid alone, even if a file system replaced characters.
    """
    name = location.rpartition("/")[2]
    match = _CATALOG_NAME.search(name)
    return match[1].lower() if match else folded(name)


class OtherNames:
    """The names that needed files may have in a listing, beside their own paths.

    Locations are paths or URIs. A URI may lead under the same root by another name of it, such as a link. Only a hash
    of each is kept: two names that share one only spare a file too many. Nothing is kept of a path in ASCII and in
    lower case, as ``folded`` of a listed path is such a path.
    """

    def __init__(self, locations: Iterable[str] = ()) -> None:
        self._hashes: set[int] = set()
        self.update(locations)

    def update(self, locations: Iterable[str]) -> None:
        """Add the other names of locations."""
        for location in locations:
            is_elsewhere = is_uri(location) if "://" in location else False
            if is_elsewhere or not (location.isascii() and location.islower()):
                has_uuid = is_elsewhere or _UUID.search(location.rpartition("/")[2]) is not None
                self._hashes.add(hash(name_identity(location) if has_uuid else folded(location)))

    def __contains__(self, path: object) -> bool:
        if not self._hashes or not isinstance(path, str):
            return False
        return hash(name_identity(path)) in self._hashes or hash(folded(path)) in self._hashes


class FoldedSet:
    """A set of texts, which also tells whether a text resembles a member."""

    def __init__(self) -> None:
        self._members: set[str] = set()
        self._folded: set[str] = set()

    def update(self, texts: Iterable[str]) -> None:
        """Add members."""
        for text in texts:
            self._members.add(text)
            self._folded.add(folded(text))

    def __contains__(self, text: object) -> bool:
        return text in self._members

    def has_like(self, text: str) -> bool:
        """Whether a member differs in nothing but case and normalisation."""
        return folded(text) in self._folded
