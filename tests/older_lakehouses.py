"""Copies of lakehouses as older or foreign writers create them, with other root names and another form of nodes."""

from __future__ import annotations

from tests.format.node_file_variants import NodeFileVariant
from trinitylake_ops import Lakehouse
from trinitylake_ops.format.file_names import RootNaming, parse_root_path
from trinitylake_ops.format.keys import PREVIOUS_ROOT, ROLLBACK_FROM_ROOT
from trinitylake_ops.format.node_file import decode_node
from trinitylake_ops.storage import Storage

#: The oldest form of a root without children.
OLDEST_FORM = NodeFileVariant("value", has_pnode=False, has_null_row=False, txn="string", definition_key="lakehouse")


def copy_in_older_form(
    lake: Lakehouse, storage: Storage, naming: RootNaming, form: NodeFileVariant = OLDEST_FORM
) -> None:
    """Copy a lakehouse into an empty storage with other root names and, for roots that support it, another form."""
    lake.close()
    for info in lake.storage.list():
        data, path = lake.storage.read(info.path), info.path
        version = parse_root_path(path)
        if version is not None:
            node = decode_node(data, path)
            for name in (PREVIOUS_ROOT, ROLLBACK_FROM_ROOT):
                if name in node.system:
                    node.system[name] = naming.path(version - 1)
            root_form = form if form.supports(node) else NodeFileVariant("value", n_blank=0)
            data, path = root_form.encode(node), naming.path(version)
        storage.create(path, data)
