"""The content of a lakehouse as a plain dict, and the operations of simulated transactions on it.

Keys: ("namespace", ns), ("table", ns, table) and ("setting", name); values: a token that no other operation writes. The
time to live of transactions is also a setting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trinitylake_ops import TableDef
from trinitylake_ops.transaction.transaction import Transaction
from trinitylake_ops.versions.snapshot import CatalogReader

Key = tuple[str, ...]
State = dict[Key, str]
TOKEN = "token"
TIME_TO_LIVE = "time to live"


@dataclass(frozen=True)
class Operation:
    """One operation of a transaction: its kind, its object, and the token that it writes."""

    kind: str
    namespace: str = ""
    table: str = ""
    token: str = ""


def run(operation: Operation, txn: Transaction) -> Any:
    """Run an operation in a transaction and return its result."""
    return _IN_LAKEHOUSE[operation.kind](operation, txn)


def replay(operation: Operation, state: State) -> Any:
    """Apply an operation to a state and return the result that a transaction would get."""
    return _IN_MODEL[operation.kind](operation, state)


def contents(reader: CatalogReader) -> State:
    """Return the content of a version, or of a transaction."""
    definition = reader.definition
    content = {("setting", name): token for name, token in definition.properties.items()}
    content["setting", TIME_TO_LIVE] = str(definition.txn_ttl_millis)
    for namespace in reader.namespaces():
        content["namespace", namespace] = reader.namespace(namespace).properties[TOKEN]
        for table in reader.tables(namespace):
            properties = reader.table(namespace, table).properties
            if TOKEN in properties:
                content["table", namespace, table] = properties[TOKEN]
    return content


def _read(operation: Operation, txn: Transaction) -> str | None:
    if not txn.has_table(operation.namespace, operation.table):
        return None
    return txn.table(operation.namespace, operation.table).properties[TOKEN]


def _list(operation: Operation, txn: Transaction) -> list[str] | None:
    return txn.tables(operation.namespace) if txn.has_namespace(operation.namespace) else None


def _put(operation: Operation, txn: Transaction) -> str:
    if not txn.has_namespace(operation.namespace):
        return "no namespace"
    definition = TableDef(properties={TOKEN: operation.token})
    if txn.has_table(operation.namespace, operation.table):
        txn.alter_table(operation.namespace, operation.table, definition)
        return "altered"
    txn.create_table(operation.namespace, operation.table, definition)
    return "created"


def _drop(operation: Operation, txn: Transaction) -> bool:
    if not (txn.has_namespace(operation.namespace) and txn.has_table(operation.namespace, operation.table)):
        return False
    txn.drop_table(operation.namespace, operation.table)
    return True


def _create_namespace(operation: Operation, txn: Transaction) -> bool:
    if txn.has_namespace(operation.namespace):
        return False
    txn.create_namespace(operation.namespace, {TOKEN: operation.token})
    return True


def _drop_namespace(operation: Operation, txn: Transaction) -> list[str] | None:
    tables = _list(operation, txn)
    if tables is not None:
        txn.drop_namespace(operation.namespace, cascade=True)
    return tables


def _set(operation: Operation, txn: Transaction) -> None:
    definition = txn.definition
    properties = {**definition.properties, operation.namespace: operation.token}
    txn.alter_definition(replace(definition, properties=properties))


def _set_time_to_live(operation: Operation, txn: Transaction) -> None:
    txn.alter_definition(replace(txn.definition, txn_ttl_millis=int(operation.token)))


_IN_LAKEHOUSE: Mapping[str, Callable[[Operation, Transaction], Any]] = {
    "read": _read,
    "list": _list,
    "namespaces": lambda operation, txn: txn.namespaces(),
    "put": _put,
    "drop": _drop,
    "create namespace": _create_namespace,
    "drop namespace": _drop_namespace,
    "set": _set,
    "set time to live": _set_time_to_live,
    "setting": lambda operation, txn: txn.definition.properties.get(operation.namespace),
}


def _tables(state: State, namespace: str) -> list[str]:
    return sorted(key[2] for key in state if key[0] == "table" and key[1] == namespace)


def _model_list(operation: Operation, state: State) -> list[str] | None:
    return _tables(state, operation.namespace) if ("namespace", operation.namespace) in state else None


def _model_put(operation: Operation, state: State) -> str:
    if ("namespace", operation.namespace) not in state:
        return "no namespace"
    key = ("table", operation.namespace, operation.table)
    result = "altered" if key in state else "created"
    state[key] = operation.token
    return result


def _model_create_namespace(operation: Operation, state: State) -> bool:
    if ("namespace", operation.namespace) in state:
        return False
    state["namespace", operation.namespace] = operation.token
    return True


def _model_drop_namespace(operation: Operation, state: State) -> list[str] | None:
    tables = _model_list(operation, state)
    if tables is not None:
        del state["namespace", operation.namespace]
        for table in tables:
            del state["table", operation.namespace, table]
    return tables


def _model_set(operation: Operation, state: State) -> None:
    state["setting", operation.namespace] = operation.token


def _model_set_time_to_live(operation: Operation, state: State) -> None:
    state["setting", TIME_TO_LIVE] = operation.token


_IN_MODEL: Mapping[str, Callable[[Operation, State], Any]] = {
    "read": lambda operation, state: state.get(("table", operation.namespace, operation.table)),
    "list": _model_list,
    "namespaces": lambda operation, state: sorted(key[1] for key in state if key[0] == "namespace"),
    "put": _model_put,
    "drop": lambda operation, state: state.pop(("table", operation.namespace, operation.table), None) is not None,
    "create namespace": _model_create_namespace,
    "drop namespace": _model_drop_namespace,
    "set": _model_set,
    "set time to live": _model_set_time_to_live,
    "setting": lambda operation, state: state.get(("setting", operation.namespace)),
}


def tree_of(state: State) -> State:
    """Return the part of a state that a rollback restores: everything except settings."""
    return {key: token for key, token in state.items() if key[0] != "setting"}


def part_of(state: State, only: Sequence[str]) -> State:
    """Return the part of a state that a rollback of these namespaces and tables restores.

    An empty selection means everything except settings. A namespace includes its tables.
    """
    tree = tree_of(state)
    return {key: token for key, token in tree.items() if not only or {key[1], ".".join(key[1:])} & set(only)}


def with_settings(tree: State, settings: State) -> State:
    """Return a state with the tree of one state and the settings of another."""
    return {**{key: token for key, token in settings.items() if key[0] == "setting"}, **tree_of(tree)}
