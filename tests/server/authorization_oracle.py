"""The oracle of the authorization tests. It knows names and rights, and nothing about the server or what exists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

READ, WRITE, OPERATE = "read", "write", "operate"
_LEVELS = ("none", READ, WRITE, OPERATE)
#: A scope in a namespace, which a request needs.
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
    """A unique text in a lakehouse: in a namespace, or about the lakehouse as a whole.

    ``root_of`` is the warehouse whose root it is, empty for all: a root is in the locations of tables.
    """

    text: str
    lakehouse: str
    namespace: str | None = None
    root_of: str | None = None

    def is_shown_to(self, token: Token, request: str) -> bool:
        """Whether a response to a request may contain it."""
        if self.text in request:
            return True
        if not token.sees(self.lakehouse):
            return False
        if self.namespace is not None:
            return token.may(READ, self.namespace)
        return token.reads_all or (self.root_of is not None and self.root_of in request)
