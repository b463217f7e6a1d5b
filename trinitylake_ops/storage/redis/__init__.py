"""Storage in Redis or Valkey, through redis-py.

Each file is one value. One sorted set, the index, contains the paths, sizes and times of all files.
"""
