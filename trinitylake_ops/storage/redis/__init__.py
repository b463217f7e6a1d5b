"""Redis and Valkey: each file is one value, beside one sorted set with the names, sizes and times of all.

``storage`` is the storage, and ``settings`` checks its root and options. ``scripts`` holds what the server runs in one
step. ``client`` sends each request once, and ``durability`` checks before the first write what the server keeps.
``clock`` counts on from the server's time, and ``failures`` gives typed errors. The library redis-py is imported when
such a root is opened.
"""
