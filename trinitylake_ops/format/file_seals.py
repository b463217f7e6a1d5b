"""Checks any file of the catalog against its seals; the name says of which kind a file is."""

from __future__ import annotations

from trinitylake_ops.format.definitions import check_definition_file
from trinitylake_ops.format.nodes.ipc_file import check_file_seals, footer_schema
from trinitylake_ops.format.sealed_json import check_json_file


def check_file(data: bytes, path: str) -> bool:
    """Check a node, definition or JSON file against its seals. Returns whether it has any.

    Returns False for files of other kinds. Raises CorruptFileError for a damaged file, or one in the place of another.
    """
    if path.endswith((".arrow", ".ipc")):
        return check_file_seals(data, footer_schema(data, path), path)
    if path.endswith(".binpb"):
        return check_definition_file(data, path)
    return path.endswith(".json") and check_json_file(data, path)
