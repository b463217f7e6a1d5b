"""What the server keeps of an acknowledged write: asked on each new connection, before the first write over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import NoPermissionError, ResponseError

from trinitylake_ops.errors import StorageError, StoragePermissionError, TransientError
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
        if self.settings.is_volatile:
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
        if self.settings.is_volatile:
            return
        info: dict[str, str] = {}
        for reply in replies[:3]:
            info |= _fields(self._told(reply, "INFO"))
        self._verify_memory(info)
        if int(info.get("connected_slaves", "0")) < self.settings.wait_replicas:
            raise TransientError(
                f"the server of {self.root} has {info.get('connected_slaves', '0')} replicas now, and the option"
                f" 'wait_replicas' wants {self.settings.wait_replicas}; nothing was written"
            )
        if self.settings.durability == "assured":
            return
        if info.get("aof_enabled") != "1":
            raise self._refused(
                "keeps no append-only file ('appendonly no')", "set 'appendonly yes' and 'appendfsync always'"
            )
        if self.settings.durability == "always":
            self._verify_sync(self._told(replies[3], "CONFIG GET"))
        if self.settings.waits_for_disk and isinstance(replies[3], ResponseError):
            raise self._refused("has no WAITAOF, which came with Redis 7.2", "set 'appendfsync always' there")

    def _verify_memory(self, info: Mapping[str, str]) -> None:
        policy = info.get("maxmemory_policy", "")
        if not policy:
            raise self._refused("does not tell its 'maxmemory-policy'", "let INFO memory show it")
        if policy.startswith("allkeys"):
            raise self._refused(f"may evict any key ('maxmemory-policy {policy}')", "set 'maxmemory-policy noeviction'")

    def _verify_sync(self, reply: Any) -> None:
        if isinstance(reply, Mapping):
            given = {_text(name): _text(value) for name, value in reply.items()}
        else:
            given = dict(zip(map(_text, reply[::2]), map(_text, reply[1::2]), strict=True))
        sync = given.get("appendfsync")
        if sync is None:
            raise self._refused("does not tell its 'appendfsync'", "let CONFIG GET show it")
        if sync != "always":
            raise self._refused(
                f"answers before a write is on its disk ('appendfsync {sync}')", "set 'appendfsync always'"
            )
        if given.get("no-appendfsync-on-rewrite") == "yes":
            raise self._refused(
                "syncs nothing while it rewrites its file ('no-appendfsync-on-rewrite yes')", "set it to 'no'"
            )

    def _told(self, reply: Any, command: str) -> Any:
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

    def _refused(self, what: str, advice: str) -> StorageError:
        return StorageError(
            f"the server of {self.root} {what}, so commits could be lost; nothing was written; {advice}; {_OTHERWISE}"
        )


def _fields(info: Any) -> dict[str, str]:
    """Return the ``name:value`` lines of INFO."""
    return dict(line.split(":", 1) for line in _text(info).splitlines() if ":" in line)


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
