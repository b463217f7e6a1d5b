"""Checking any file of the catalog against the seals that it carries, by what its name says it is."""

from __future__ import annotations

from trinitylake_ops.format.definitions import check_definition_file
from trinitylake_ops.format.nodes.ipc_file import check_file_seals, footer_schema
from trinitylake_ops.format.sealed_json import check_json_file


def check_file(data: bytes, path: str) -> bool:
    """Check a node, definition or JSON file against its seals; whether it has any.

    False for files of other kinds. Raises CorruptFileError for one that is damaged, or another one's.
    """
    if path.endswith((".arrow", ".ipc")):
        return check_file_seals(data, footer_schema(data, path), path)
    if path.endswith(".binpb"):
        return check_definition_file(data, path)
    return path.endswith(".json") and check_json_file(data, path)
