"""Storage systems behind one interface, and the wrappers around them."""

from trinitylake_ops.storage.interface import FileInfo, Storage
from trinitylake_ops.storage.local import LocalStorage
from trinitylake_ops.storage.memory import MemoryStorage, drop_memory_root
from trinitylake_ops.storage.meter import Measurement, MeteredStorage, RequestCounts
from trinitylake_ops.storage.open import open_storage
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.storage.paths import TEMPORARY_PREFIX
from trinitylake_ops.storage.retry import RetryStorage
from trinitylake_ops.storage.wrapper import StorageWrapper

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
