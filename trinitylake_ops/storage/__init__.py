"""Storage systems with a common interface, and storage wrappers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinitylake_ops._lazy import lazy_face

if TYPE_CHECKING:
    from trinitylake_ops.storage.cache.storage import clear_process_caches
    from trinitylake_ops.storage.interface import FileInfo, Storage, StorageWrapper
    from trinitylake_ops.storage.local.storage import LocalStorage
    from trinitylake_ops.storage.memory import MemoryStorage, drop_memory_root
    from trinitylake_ops.storage.meter import Measurement, MeteredStorage, RequestCounts
    from trinitylake_ops.storage.opening import open_storage
    from trinitylake_ops.storage.parallel import run_parallel
    from trinitylake_ops.storage.paths import TEMPORARY_PREFIX
    from trinitylake_ops.storage.retry import RetryStorage

__all__ = [
    "TEMPORARY_PREFIX",
    "FileInfo",
    "LocalStorage",
    "Measurement",
    "MemoryStorage",
    "MeteredStorage",
    "RequestCounts",
    "RetryStorage",
    "Storage",
    "StorageWrapper",
    "clear_process_caches",
    "drop_memory_root",
    "open_storage",
    "run_parallel",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "cache.storage": ("clear_process_caches",),
        "interface": ("FileInfo", "Storage", "StorageWrapper"),
        "local.storage": ("LocalStorage",),
        "memory": ("MemoryStorage", "drop_memory_root"),
        "meter": ("Measurement", "MeteredStorage", "RequestCounts"),
        "opening": ("open_storage",),
        "parallel": ("run_parallel",),
        "paths": ("TEMPORARY_PREFIX",),
        "retry": ("RetryStorage",),
    },
)
