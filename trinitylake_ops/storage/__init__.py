"""Storage systems behind one interface, and the wrappers around them."""

from trinitylake_ops.storage.interface import FileInfo, Storage
from trinitylake_ops.storage.local.storage import LocalStorage
from trinitylake_ops.storage.memory import MemoryStorage, drop_memory_root
from trinitylake_ops.storage.open import open_storage
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.storage.paths import TEMPORARY_PREFIX
from trinitylake_ops.storage.wrappers.base import StorageWrapper
from trinitylake_ops.storage.wrappers.meter import Measurement, MeteredStorage, RequestCounts
from trinitylake_ops.storage.wrappers.retry import RetryStorage

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
    "drop_memory_root",
    "open_storage",
    "run_parallel",
]
