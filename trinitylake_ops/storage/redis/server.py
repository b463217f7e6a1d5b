r"""Durability checks of a Redis server, its clock, and the scripts that it runs.

Redis runs one script at a time and no other command in the meantime, so that no client sees a file without its entry in
the index. Redis does not roll back a failed script, so a script that changes two keys undoes the first change if the
second fails. The append-only file contains the effects of a script as one transaction: after a crash, either all or
none of them exist.

The index is a sorted set whose members all have score 0, so that Redis sorts them by their bytes. A member is the path,
a NUL, and ``size milliseconds``. Paths contain no NUL, so the members of a path are between ``path\0`` and ``path\1``.
The time is from the server's clock.
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

_ALTERNATIVES = (
    "or set a storage option: 'durability=waitaof' waits for the disk; 'durability=everysec' may lose the writes of a"
    " second; 'durability=assured' asserts that the service is durable; 'volatile=true' may lose all files"
)


@dataclass(frozen=True, slots=True)
class DurabilityCheck:
    """Verifies that the settings of a server provide the durability that the options require.

    ``always`` requires an append-only file that is synced before each response. ``waitaof`` requires an append-only
    file and the command WAITAOF (Redis 7.2, Valkey). ``everysec`` requires an append-only file. All of these and
    ``assured`` require that the server does not evict keys without an expiration. ``volatile`` requires nothing.
    """

    settings: RedisSettings
    root: str

    @property
    def commands(self) -> Sequence[Command]:
        """The commands whose replies are verified, to be sent together. Empty if nothing is required."""
        if self.settings.volatile:
            return ()
        commands: list[Command] = [("INFO", "persistence"), ("INFO", "memory"), ("INFO", "replication")]
        if self.settings.durability == "always":
            commands.append(("CONFIG", "GET", "*appendfsync*"))
        if self.settings.waits_for_disk:
            commands.append(("WAITAOF", 0, 0, 1))
        return commands

    def verify(self, replies: Sequence[Any]) -> None:
        """Verify the replies to ``commands``.

        Raises:
            StoragePermissionError: The user may not read the settings of the server.
            TransientError: The server has too few replicas at the moment.
            StorageError: The server is not durable enough.
        """
        if self.settings.volatile:
            return
        info: dict[str, str] = {}
        for reply in replies[:3]:
            info |= _fields(self._reply_or_error(reply, "INFO"))
        self._verify_memory(info)
        if int(info.get("connected_slaves", "0")) < self.settings.wait_replicas:
            raise TransientError(
                f"nothing was written: the server of {self.root} has {info.get('connected_slaves', '0')} replicas at"
                f" the moment, and the option 'wait_replicas' requires {self.settings.wait_replicas}; retry"
            )
        if self.settings.durability == "assured":
            return
        if info.get("aof_enabled") != "1":
            raise self._unsafe_server_error(
                "has no append-only file ('appendonly no')", "set 'appendonly yes' and 'appendfsync always'"
            )
        if self.settings.durability == "always":
            self._verify_sync(self._reply_or_error(replies[3], "CONFIG GET"))
        if self.settings.waits_for_disk and isinstance(replies[3], ResponseError):
            raise self._unsafe_server_error(
                "does not support WAITAOF, which requires Redis 7.2", "set 'appendfsync always'"
            )

    def _verify_memory(self, info: Mapping[str, str]) -> None:
        policy = info.get("maxmemory_policy", "")
        if not policy:
            raise self._unsafe_server_error("does not report its 'maxmemory-policy'", "allow INFO memory to show it")
        if policy.startswith("allkeys"):
            raise self._unsafe_server_error(
                f"may evict any key ('maxmemory-policy {policy}')", "set 'maxmemory-policy noeviction'"
            )

    def _verify_sync(self, reply: Any) -> None:
        if isinstance(reply, Mapping):
            settings = {_text(name): _text(value) for name, value in reply.items()}
        else:
            settings = dict(zip(map(_text, reply[::2]), map(_text, reply[1::2]), strict=True))
        sync = settings.get("appendfsync")
        if sync is None:
            raise self._unsafe_server_error("does not report its 'appendfsync'", "allow CONFIG GET to show it")
        if sync != "always":
            raise self._unsafe_server_error(
                f"responds before a write is on its disk ('appendfsync {sync}')", "set 'appendfsync always'"
            )
        if settings.get("no-appendfsync-on-rewrite") == "yes":
            raise self._unsafe_server_error(
                "does not sync while it rewrites its file ('no-appendfsync-on-rewrite yes')", "set it to 'no'"
            )

    def _reply_or_error(self, reply: Any, command: str) -> Any:
        if isinstance(reply, NoPermissionError) or (
            isinstance(reply, ResponseError) and "unknown command" in str(reply)
        ):
            raise StoragePermissionError(
                f"nothing was written: this user may not read the durability settings of the server of {self.root}"
                f" ({command}); allow the command, {_ALTERNATIVES}"
            )
        if isinstance(reply, Exception):
            raise StorageError(
                f"nothing was written: the server of {self.root} does not report its durability settings ({command}:"
                f" {reply}); check the server"
            )
        return reply

    def _unsafe_server_error(self, what: str, advice: str) -> StorageError:
        return StorageError(
            f"nothing was written: the server of {self.root} {what}, so commits could be lost; {advice},"
            f" {_ALTERNATIVES}"
        )


def _fields(info: Any) -> dict[str, str]:
    """Return the ``name:value`` lines of INFO."""
    return dict(line.split(":", 1) for line in _text(info).splitlines() if ":" in line)


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


#: Maximum age of the server's time, so that a clock change, or a different server after a failover, is detected.
MAX_AGE_MS = 60_000.0


class ServerClock:
    """Extrapolates the server's last time with the local monotonic clock, so that a commit sends at most one request.

    The extrapolation is slightly slower than the local clock. The result is therefore never ahead of the server's
    clock, and lags by up to 12 ms plus the latency of the response. It decreases only if the server's clock was set
    back, or a server with another clock replaced the server.

    Args:
        local_ms: Returns the local monotonic time in milliseconds.
    """

    def __init__(self, local_ms: Callable[[], float] = monotonic_ms):
        self._local_ms = local_ms
        #: The server's time and the local time of the last response.
        self._last: tuple[float, float] | None = None

    def now_ms(self, fetch_time: Callable[[], float]) -> int:
        """Return the time of the server's clock, in milliseconds since the epoch.

        Args:
            fetch_time: Requests the server's time.
        """
        last = self._last
        if last is None or not 0 <= self._local_ms() - last[1] <= MAX_AGE_MS:
            server_ms = fetch_time()
            self._last = last = (server_ms, self._local_ms())
        server_ms, local_ms = last
        return int(server_ms + (self._local_ms() - local_ms) * (1 - MAX_DRIFT))


#: Separates the path of a member from its size and time.
END_OF_PATH = b"\0"
#: Sorts after all members of a path and before all longer paths.
AFTER_PATH = b"\1"
#: Sorts after all text in UTF-8.
AFTER_ALL = b"\xff"

_NEW_MEMBER = r"""
local time = redis.call('TIME')
local now_ms = time[1] .. string.format('%03d', math.floor(tonumber(time[2]) / 1000))
local member = ARGV[1] .. '\0' .. string.len(ARGV[2]) .. ' ' .. now_ms
"""

#: Keys: index, content. Arguments: path, body. Returns 1 if the file was created, 0 if it exists.
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

#: Key: content. Arguments: offset, length (-1: to the end), size limit. Returns the bytes, nil if the file does not
#: exist, or the number of bytes to the end if it exceeds the limit.
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
    """Return the bounds of a path's members, for ZRANGEBYLEX."""
    return b"[" + member_path + END_OF_PATH, b"(" + member_path + AFTER_PATH


def file_info(member: bytes, folder: str) -> FileInfo | None:
    """Parse a member of the index.

    Args:
        member: The member.
        folder: Folder of the root.

    Returns:
        The metadata of the file, or None if the member is invalid.
    """
    match = _MEMBER.fullmatch(member)
    if match is None:
        return None
    member_path, size, time_ms = match.groups()
    try:
        path = member_path.decode().removeprefix(folder)
        check_path(path)
    except (UnicodeDecodeError, InvalidLocationError):
        return None
    return FileInfo(path, int(size), int(time_ms))


def path_of(member: bytes) -> bytes:
    """Return the path of a member."""
    return member.partition(END_OF_PATH)[0]
