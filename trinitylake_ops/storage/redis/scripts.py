r"""What the server runs in one step, in Lua.

Redis runs one script at a time and nothing beside it, so nobody sees a file without its entry in the index. A script
that fails is not rolled back by Redis, so a script that changes two keys undoes the first change if the second fails.
The effects of a script stand in the append-only file as one transaction: after a crash there are all or none.

The index is a sorted set whose members all have score 0, so Redis keeps them in the order of their bytes. A member is
the path, a NUL, and ``size milliseconds``. No path holds a NUL, so the members of one path lie between ``path\0`` and
``path\1``. The time is the server's own.
"""

from __future__ import annotations

import re

from trinitylake_ops.errors import InvalidLocationError
from trinitylake_ops.storage.interface import FileInfo
from trinitylake_ops.storage.paths import check_path

#: Separates the path of a member from size and time.
END_OF_PATH = b"\0"
#: What follows every member of a path, and comes before every longer path.
AFTER_PATH = b"\1"
#: What follows every text in UTF-8.
AFTER_ALL = b"\xff"

_NEW_MEMBER = r"""
local time = redis.call('TIME')
local now_ms = time[1] .. string.format('%03d', math.floor(tonumber(time[2]) / 1000))
local member = ARGV[1] .. '\0' .. string.len(ARGV[2]) .. ' ' .. now_ms
"""

#: Keys: index, content. Arguments: path, body. Returns 1 when it was created, 0 when the name is taken.
CREATE = (
    r"""
if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
"""
    + _NEW_MEMBER
    + r"""
redis.call('ZADD', KEYS[1], 0, member)
local done = redis.pcall('SET', KEYS[2], ARGV[2], 'NX')
if type(done) == 'table' and done.err then
  redis.call('ZREM', KEYS[1], member)
  return done
end
return 1
"""
)

#: Keys: index, content. Arguments: path, body.
WRITE = (
    _NEW_MEMBER
    + r"""
local old = redis.call('ZRANGEBYLEX', KEYS[1], '[' .. ARGV[1] .. '\0', '(' .. ARGV[1] .. '\1')
local is_new = redis.call('ZADD', KEYS[1], 0, member) == 1
local done = redis.pcall('SET', KEYS[2], ARGV[2])
if type(done) == 'table' and done.err then
  if is_new then redis.call('ZREM', KEYS[1], member) end
  return done
end
for _, before in ipairs(old) do
  if before ~= member then redis.call('ZREM', KEYS[1], before) end
end
return 1
"""
)

#: Keys: index, contents. Arguments: paths.
DELETE = r"""
for i, path in ipairs(ARGV) do
  redis.call('UNLINK', KEYS[i + 1])
  for _, member in ipairs(redis.call('ZRANGEBYLEX', KEYS[1], '[' .. path .. '\0', '(' .. path .. '\1')) do
    redis.call('ZREM', KEYS[1], member)
  end
end
return 1
"""

#: Key: content. Arguments: offset, length (-1: to the end), the most bytes to the end. Returns the bytes, nil for a
#: missing file, or a number: the bytes to the end, which are too many.
READ = r"""
local size = redis.call('STRLEN', KEYS[1])
if size == 0 and redis.call('EXISTS', KEYS[1]) == 0 then return false end
local offset, length, limit = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local rest = math.max(size - offset, 0)
if length < 0 then
  if rest > limit then return rest end
  length = rest
end
length = math.min(length, rest)
if length == 0 then return '' end
if length == size then return redis.call('GET', KEYS[1]) end
return redis.call('GETRANGE', KEYS[1], offset, offset + length - 1)
"""

_MEMBER = re.compile(rb"([^\0]+)\0([0-9]{1,18}) ([0-9]{1,18})", re.DOTALL)


def member_range(member_path: bytes) -> tuple[bytes, bytes]:
    """Return the bounds of a path's members for ZRANGEBYLEX."""
    return b"[" + member_path + END_OF_PATH, b"(" + member_path + AFTER_PATH


def file_info(member: bytes, folder: str) -> FileInfo | None:
    """Return the file of a member below a folder, or None for a member that our scripts never make."""
    match = _MEMBER.fullmatch(member)
    if match is None:
        return None
    spelled, size, time_ms = match.groups()
    try:
        path = spelled.decode().removeprefix(folder)
        check_path(path)
    except (UnicodeDecodeError, InvalidLocationError):
        return None
    return FileInfo(path, int(size), int(time_ms))


def path_of(member: bytes) -> bytes:
    """Return the part of a member that is its path."""
    return member.partition(END_OF_PATH)[0]
