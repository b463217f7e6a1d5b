"""Reads the settings of a lakehouse and the first nodes below a root in one round (docs/protocol.md, F).

A key is padded to sizes that only the lakehouse definition tells. Most lakehouses keep the default sizes, so a key that
is padded to them tells which nodes will be read next. A wrong guess costs requests, never an answer.
"""

from __future__ import annotations

from collections.abc import Callable

from trinitylake_ops.errors import InvalidNameError
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.nodes.keys import KeyCodec
from trinitylake_ops.format.nodes.node_file import NodeFile
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.tree.key_ranges import KeyRange
from trinitylake_ops.tree.nodes.node_store import NodeStore
from trinitylake_ops.versions.definition_store import DefinitionStore

#: The keys that a caller is about to read, in the encoding of the lakehouse.
Wanted = Callable[[KeyCodec], KeyRange]

_MOST_NODES = 1_000  # of a list; each has a request of its own
_DEFAULTS = LakehouseDef(id="")
_LIKELY_KEYS = KeyCodec(_DEFAULTS.namespace_name_max_size_bytes, _DEFAULTS.table_name_max_size_bytes)


def read_ahead(
    storage: Storage,
    definitions: DefinitionStore,
    nodes: NodeStore,
    definition_location: str,
    root: NodeFile,
    wanted: Wanted,
) -> None:
    """Read the lakehouse definition, unless it is known, together with the nodes where the wanted keys likely are.

    What cannot be read or decoded is left to who needs it.
    """
    definition_path = None if root.is_leaf else definitions.unread_path(definition_location)
    if definition_path is None:
        return
    try:
        keys = wanted(_LIKELY_KEYS)
    except InvalidNameError:  # perhaps only too long for the default sizes
        return
    node_paths = [path for child in keys.part_of(root).children if (path := nodes.unread_path(child)) is not None]
    if not 0 < len(node_paths) <= _MOST_NODES:
        return
    definition, *contents = storage.read_available([definition_path, *node_paths])
    definitions.offer_lakehouse(definition_location, definition_path, definition)
    nodes.offer(node_paths, contents)
