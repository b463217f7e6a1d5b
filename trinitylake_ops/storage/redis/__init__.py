"""Storage in Redis or Valkey: each file is one value, beside one sorted set with the names, sizes and times of all.

Modules: ``settings`` checks roots and options, ``scripts`` holds what the server runs in one step, ``client`` sends
requests once each, ``durability`` checks what the server keeps, ``failures`` gives typed errors, ``storage`` is the
storage. The library redis-py is imported when such a root is opened.
"""
