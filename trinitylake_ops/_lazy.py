"""Lazy public packages: each name is imported on first use, so that a program loads only what it needs."""

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
    """Return ``__getattr__`` and ``__dir__`` of a package that offers names of its modules.

    ``modules`` lists the names of each module, relative to the package. A module that is offered itself has none. With
    ``extra`` the modules need the packages of that extra, and their use raises MissingExtraError without them.
    """
    module_of = {name: module for module, names in modules.items() for name in names}
    offered = sorted([*module_of, *(module for module, names in modules.items() if not names)])

    def find(name: str) -> Any:
        if name not in offered:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with nullcontext() if extra is None else needs(extra):
            module = import_module(f"{package}.{module_of.get(name, name)}")
        found = getattr(module, name) if name in module_of else module
        setattr(sys.modules[package], name, found)
        return found

    return find, lambda: list(offered)


T = TypeVar("T")


class cached_attribute(Generic[T]):  # noqa: N801 - written as a decorator, as functools.cached_property is
    """A method without arguments that is called once for each object; what it returns becomes the attribute.

    ``functools.cached_property`` of Python 3.11 holds one lock for all objects of a class while it computes. A slow
    read then stops all other threads. A child that is forked meanwhile waits for ever, as it does not have the reading
    thread. Here two threads that ask at the same moment compute twice, and the last result stays.
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
        # Once it stands in the object's own dictionary, Python looks no further.
        value = instance.__dict__[self._name] = self._compute(instance)
        return value
