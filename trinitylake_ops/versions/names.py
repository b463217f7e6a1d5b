"""Finds the object of a dotted name. Names of namespaces and tables may hold dots themselves."""

from __future__ import annotations

from trinitylake_ops.errors import InvalidInputError, InvalidNameError, TableNotFoundError
from trinitylake_ops.versions.snapshot import CatalogReader


def resolve_table(text: str, *readers: CatalogReader) -> tuple[str, str]:
    """Return the namespace and the table of ``namespace.table``, as any of the readers has them.

    Each dot is tried as the one between namespace and table. Raises TableNotFoundError if there is no such table.
    Raises InvalidInputError for a name without a dot, or one that means several tables.
    """
    splits = [(text[:dot], text[dot + 1 :]) for dot, char in enumerate(text) if char == "."]
    if not splits:
        raise InvalidInputError(f"{text!r} names no table; write NAMESPACE.TABLE")
    found = [split for split in splits if any(_has_table(reader, *split) for reader in readers)]
    if not found:
        raise TableNotFoundError(f"there is no table {text}")
    if len(found) > 1:
        meanings = " or ".join(f"table {table!r} of namespace {namespace!r}" for namespace, table in found)
        raise InvalidInputError(f"{text!r} is ambiguous: {meanings}")
    return found[0]


def _has_table(reader: CatalogReader, namespace: str, table: str) -> bool:
    try:
        return reader.has_table(namespace, table)
    except InvalidNameError:
        return False
