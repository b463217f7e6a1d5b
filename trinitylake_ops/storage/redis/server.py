r"""What a server of Redis must keep, its clock, and the scripts that it runs.

Redis runs one script at a time and nothing beside it, so nobody sees a file without its entry in the index. A script
that fails is not rolled back by Redis, so a script that changes two keys undoes the first change if the second fails.
The effects of a script stand in the append-only file as one transaction: after a crash there are all or none.

The index is a sorted set whose members all have score 0, so Redis keeps them in the order of their bytes. A member is
the path, a NUL, and ``size milliseconds``. No path holds a NUL, so the members of one path lie between ``path\0`` and
``path\1``. The time is the server's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import NoPermissionError, ResponseError

from trinitylake_ops.errors import InvalidLocationError, StorageError, StoragePermissionError, TransientError
from trinitylake_ops.storage.http.clock import MAX_DRIFT, monotonic_ms
from trinitylake_ops.storage.interface import FileInfo
from trinitylake_ops.storage.paths import check_path
from trinitylake_ops.storage.redis.settings import RedisSettings

Command = tuple[str | bytes | int, ...]

_OTHERWISE = (
    "or choose by a storage option: 'durability=waitaof' waits for the disk; 'durability=everysec' may lose a second;"
    " 'durability=assured' is your word that the service keeps all; 'volatile=true' may lose all"
)


@dataclass(frozen=True, slots=True)
class DurabilityCheck:
    """What is asked of a server, and what its answers must say.

    ``always`` wants an append-only file that is synced before each answer. ``waitaof`` wants one, and a server that can
    be asked to wait for its sync (Redis 7.2, Valkey). ``everysec`` wants one, ``assured`` none. In all of them the
    server must not evict keys that never expire. ``volatile`` wants nothing.
    """

    settings: RedisSettings
    root: str

    @property
    def commands(self) -> Sequence[Command]:
        """The commands to send, all at once; none where nothing is asked for."""
        if self.settings.volatile:
            return ()
        asked: list[Command] = [("INFO", "persistence"), ("INFO", "memory"), ("INFO", "replication")]
        if self.settings.durability == "always":
            asked.append(("CONFIG", "GET", "*appendfsync*"))
        if self.settings.waits_for_disk:
            asked.append(("WAITAOF", 0, 0, 1))
        return asked

    def verify(self, replies: Sequence[Any]) -> None:
        """Refuse a server that keeps less than was asked for.

        Raises StorageError, StoragePermissionError where the server does not tell, TransientError where it has too few
        replicas now.
        """
        if self.settings.volatile:
            return
        info: dict[str, str] = {}
        for reply in replies[:3]:
            info |= _fields(self._reply_or_error(reply, "INFO"))
        self._verify_memory(info)
        if int(info.get("connected_slaves", "0")) < self.settings.wait_replicas:
            raise TransientError(
                f"the server of {self.root} has {info.get('connected_slaves', '0')} replicas now, and the option"
                f" 'wait_replicas' wants {self.settings.wait_replicas}; nothing was written"
            )
        if self.settings.durability == "assured":
            return
        if info.get("aof_enabled") != "1":
            raise self._unsafe_server_error(
                "keeps no append-only file ('appendonly no')", "set 'appendonly yes' and 'appendfsync always'"
            )
        if self.settings.durability == "always":
            self._verify_sync(self._reply_or_error(replies[3], "CONFIG GET"))
        if self.settings.waits_for_disk and isinstance(replies[3], ResponseError):
            raise self._unsafe_server_error(
                "has no WAITAOF, which came with Redis 7.2", "set 'appendfsync always' there"
            )

    def _verify_memory(self, info: Mapping[str, str]) -> None:
        policy = info.get("maxmemory_policy", "")
        if not policy:
            raise self._unsafe_server_error("does not tell its 'maxmemory-policy'", "let INFO memory show it")
        if policy.startswith("allkeys"):
            raise self._unsafe_server_error(
                f"may evict any key ('maxmemory-policy {policy}')", "set 'maxmemory-policy noeviction'"
            )

    def _verify_sync(self, reply: Any) -> None:
        if isinstance(reply, Mapping):
            given = {_text(name): _text(value) for name, value in reply.items()}
        else:
            given = dict(zip(map(_text, reply[::2]), map(_text, reply[1::2]), strict=True))
        sync = given.get("appendfsync")
        if sync is None:
            raise self._unsafe_server_error("does not tell its 'appendfsync'", "let CONFIG GET show it")
        if sync != "always":
            raise self._unsafe_server_error(
                f"answers before a write is on its disk ('appendfsync {sync}')", "set 'appendfsync always'"
            )
        if given.get("no-appendfsync-on-rewrite") == "yes":
            raise self._unsafe_server_error(
                "syncs nothing while it rewrites its file ('no-appendfsync-on-rewrite yes')", "set it to 'no'"
            )

    def _reply_or_error(self, reply: Any, command: str) -> Any:
        if isinstance(reply, NoPermissionError) or (
            isinstance(reply, ResponseError) and "unknown command" in str(reply)
        ):
            raise StoragePermissionError(
                f"the server of {self.root} does not let this user ask what it keeps ({command}), so nothing was"
                f" written; allow the command; {_OTHERWISE}"
            )
        if isinstance(reply, Exception):
            raise StorageError(
                f"the server of {self.root} does not tell what it keeps ({command}: {reply}); nothing was written"
            )
        return reply

    def _unsafe_server_error(self, what: str, advice: str) -> StorageError:
        return StorageError(
            f"the server of {self.root} {what}, so commits could be lost; nothing was written; {advice}; {_OTHERWISE}"
        )


def _fields(info: Any) -> dict[str, str]:
    """Return the ``name:value`` lines of INFO."""
    return dict(line.split(":", 1) for line in _text(info).splitlines() if ":" in line)


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


#: The server is asked again after so long. Then a clock that was set, and another server after a failover, are seen.
MAX_AGE_MS = 60_000.0


class ServerClock:
    """Counts on from the server's last answer by the local monotonic clock, so that a commit asks at most once.

    When an answer arrives, the server's clock shows what it says at least. From there it is counted on a little slower
    than the local clock. So the result never leads the server's clock, and lags by the way of the answer and 12 ms.
    It goes back only where the server's clock was set back, or a server with another clock took its place.
    """

    def __init__(self, local_ms: Callable[[], float] = monotonic_ms):
        self._local_ms = local_ms
        self._known: tuple[float, float] | None = None

    def now_ms(self, fetch_time: Callable[[], float]) -> int:
        """Return milliseconds since the epoch on the server's clock. ``fetch_time`` returns the server's time now."""
        known = self._known
        if known is None or not 0 <= self._local_ms() - known[1] <= MAX_AGE_MS:
            server_ms_now = fetch_time()
            self._known = known = (server_ms_now, self._local_ms())
        server_ms_now, at_ms = known
        return int(server_ms_now + (self._local_ms() - at_ms) * (1 - MAX_DRIFT))


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
