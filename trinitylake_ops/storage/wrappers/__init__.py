"""Storages around a storage: each takes one and is one."""
