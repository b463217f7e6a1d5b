"""Attributes that are computed when they are first read, each object by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

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
