"""An oracle for the authorization tests. It decides from names and rights only, without access to a server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

READ, WRITE, OPERATE = "read", "write", "operate"
_LEVELS = ("none", READ, WRITE, OPERATE)
#: A scope that a request needs, and the namespace in which it needs it.
Need = tuple[str, str]


@dataclass(frozen=True)
class Token:
    """A token, as described by its entry in the operator's file. ``lakehouses`` is None for every lakehouse."""

    name: str
    scope: str = "none"
    namespaces: Mapping[str, str] = field(default_factory=dict)
    lakehouses: frozenset[str] | None = None

    def may(self, scope: str, namespace: str) -> bool:
        return _LEVELS.index(self.namespaces.get(namespace, self.scope)) >= _LEVELS.index(scope)

    def sees(self, lakehouse: str) -> bool:
        reads_any = any(_LEVELS.index(scope) > 0 for scope in (self.scope, *self.namespaces.values()))
        return reads_any and (self.lakehouses is None or lakehouse in self.lakehouses)

    @property
    def reads_all(self) -> bool:
        return all(_LEVELS.index(scope) > 0 for scope in (self.scope, *self.namespaces.values()))

    def allows(self, lakehouse: str, needs: Iterable[Need]) -> bool:
        """Whether a request to a lakehouse is authorized."""
        return self.sees(lakehouse) and all(self.may(scope, namespace) for scope, namespace in needs)


@dataclass(frozen=True)
class Secret:
    """A unique string in a lakehouse, either in one namespace or in data of the whole lakehouse.

    ``root_of`` is set if the string is part of a root, because responses contain roots in table locations. It is the
    warehouse with this root, or empty for the root of the lakehouse itself.
    """

    text: str
    lakehouse: str
    namespace: str | None = None
    root_of: str | None = None

    def may_be_sent_to(self, token: Token, request: str) -> bool:
        """Whether a response to a request of this token may contain the string."""
        if self.text in request:
            return True
        if not token.sees(self.lakehouse):
            return False
        if self.namespace is not None:
            return token.may(READ, self.namespace)
        return token.reads_all or (self.root_of is not None and self.root_of in request)
