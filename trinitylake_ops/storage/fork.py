"""Objects that start anew in a forked child: locks that a thread of its parent held, and the data under them."""

from __future__ import annotations

import ctypes
import os
from typing import Protocol
from weakref import WeakSet


class Forgetful(Protocol):
    """Something that can start anew."""

    def forget(self) -> None: ...


def at_fork(forgetful: Forgetful) -> None:
    """Let something start anew in every child that is forked while it lives."""
    _forgetful.add(forgetful)


def keep_for_ever(thing: object) -> None:
    """Let nothing, not even the end of the interpreter, destroy an object: in a child, one of its parent's.

    A destroyed connection takes its socket off the list of those that its event loop waits for. A forked child shares
    that list with its parent, which would then wait for an answer in vain.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _forget_all() -> None:
    for forgetful in list(_forgetful):
        forgetful.forget()


_forgetful: WeakSet[Forgetful] = WeakSet()
os.register_at_fork(after_in_child=_forget_all)
