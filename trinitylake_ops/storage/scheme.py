"""What a kind of storage says about itself: the scheme of its roots, its options, and how a root is opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.storage.options import StorageOptions


@dataclass(frozen=True, slots=True)
class Scheme:
    """A kind of storage.

    ``name`` is what its roots begin with, before ``://``. ``options`` are the names of its own options
    (docs/storage.md). ``open`` returns the storage of a normalised root, without retries around it, and sends no
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
