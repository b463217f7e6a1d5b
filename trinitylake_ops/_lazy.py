"""Lazy imports for public packages: each name is imported on first use, so that a program loads only what it needs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any, Generic, TypeVar, overload

from trinitylake_ops.extras import needs


def lazy_face(
    package: str, modules: Mapping[str, Sequence[str]], *, extra: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package that exports names of its modules.

    Args:
        package: The full name of the package.
        modules: The exported names of each module. Module names are relative to the package. A module with no names is
            itself exported.
        extra: The extra that the modules need. Without its packages, access raises MissingExtraError.
    """
    module_of = {name: module for module, names in modules.items() for name in names}
    exported = sorted([*module_of, *(module for module, names in modules.items() if not names)])

    def find(name: str) -> Any:
        if name not in exported:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with nullcontext() if extra is None else needs(extra):
            module = import_module(f"{package}.{module_of.get(name, name)}")
        attribute = getattr(module, name) if name in module_of else module
        setattr(sys.modules[package], name, attribute)
        return attribute

    return find, lambda: list(exported)


T = TypeVar("T")


class cached_attribute(Generic[T]):  # noqa: N801 - named like a decorator, as functools.cached_property is
    """Like ``functools.cached_property``, but without a lock.

    In Python 3.11, ``functools.cached_property`` holds a single lock for all instances of a class while it computes a
    value. A slow read therefore blocks all other threads, and a child process that is forked in the meantime deadlocks,
    because it does not have the thread that holds the lock. Here, two threads may compute the value concurrently, and
    the last result is kept.
    """

    def __init__(self, compute: Callable[[Any], T]):
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached_attribute[T]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object | None, owner: type) -> cached_attribute[T] | T:
        if instance is None:
            return self
        # Python finds the value in the instance dictionary from now on and no longer calls this method.
        value = instance.__dict__[self._name] = self._compute(instance)
        return value
