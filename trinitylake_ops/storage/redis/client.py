"""The client for Redis and Valkey, with and without TLS or clusters."""

from __future__ import annotations

import functools
import socket
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet, finalize

from redis import Connection, ConnectionPool, RedisCluster, SSLConnection
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.exceptions import AskError, AuthenticationError, BusyLoadingError, MovedError, ReadOnlyError, ResponseError
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry

from trinitylake_ops.storage.background import at_fork
from trinitylake_ops.storage.redis.errors import CLIENT_ERRORS, NoConnectionError, NoResponseError
from trinitylake_ops.storage.redis.server import Command, DurabilityCheck
from trinitylake_ops.storage.redis.settings import RedisLocation, RedisSettings

_PLAIN_RESPONSES = (b"+", b"-")


class TlsConnection(SSLConnection):
    """A TLS connection whose handshake uses the connect timeout instead of redis-py's read timeout.

    A server without TLS interprets a handshake as an incomplete line and waits for the rest. After a handshake that
    times out, the server is therefore probed with a command in plain text, without credentials. Raises OSError, which
    redis-py wraps.
    """

    def _connect(self) -> socket.socket:
        read_timeout_s, self.socket_timeout = self.socket_timeout, self.socket_connect_timeout
        try:
            sock: socket.socket = super()._connect()  # type: ignore[no-untyped-call]
        except TimeoutError as error:
            if "handshake" in str(error) and self._responds_without_tls():
                raise ssl.SSLError("the port does not support TLS") from error
            raise
        finally:
            self.socket_timeout = read_timeout_s
        sock.settimeout(read_timeout_s)
        return sock

    def _responds_without_tls(self) -> bool:
        try:
            plain = Connection._connect(self)
        except OSError:
            return False
        with plain:
            try:
                plain.sendall(b"PING\r\n")
                return plain.recv(1) in _PLAIN_RESPONSES
            except OSError:
                return False


#: This limit is never reached, because a thread uses one connection at a time.
_MAX_CONNECTIONS = 1 << 16
#: Maximum number of redirections of one request. If there are more, the cluster is not stable.
_MAX_REDIRECTIONS = 5


class RedisClient:
    """Sends commands to the server of a root, or to the node of a cluster that has its keys. Thread-safe.

    Each command is sent once. The retries of redis-py are disabled, because a create that is resent after a lost
    response would find its own file. Only commands that a node rejects because another node has the keys are sent
    again, to that node. Connections are created on first use, including in a forked child.
    """

    def __init__(self, location: RedisLocation, settings: RedisSettings):
        self._location = location
        self._settings = settings
        self._check = DurabilityCheck(settings, location.root)
        self._finalizers: list[finalize[[], RedisClient]] = []
        self.after_fork_in_child()
        at_fork(self)

    def after_fork_in_child(self) -> None:
        """Discard the parent's connections."""
        for finalizer in self._finalizers:
            finalizer.detach()
        self._finalizers = []
        self._lock = threading.Lock()
        self._pool: ConnectionPool | None = None
        self._cluster: RedisCluster | None = None
        self._is_cluster_changed = False
        self._checked: WeakSet[Connection] = WeakSet()

    def send(self, commands: Sequence[Command], *, changes_files: bool) -> list[Any]:
        """Send commands together and return their replies, which may be exceptions.

        Args:
            commands: The commands.
            changes_files: Whether the commands change files. The server's durability is then verified first, once
                per connection.

        Raises:
            NoConnectionError: The commands were not sent.
            NoResponseError: There is no complete response.
            StorageError: The server is not durable enough.
        """
        if not self._settings.cluster:
            return self._send_to(self._server(), self._location.address, commands, changes_files)
        replies = self._send_to_node(self._node_of_keys(), commands, changes_files, False)
        for _ in range(_MAX_REDIRECTIONS):
            moved = replies[0]
            if not isinstance(moved, AskError):
                break
            is_asking = not isinstance(moved, MovedError)
            replies = self._send_to_node(self._redirect_node(moved), commands, changes_files, is_asking)
        return replies

    def _send_to_node(
        self, node: ClusterNode, commands: Sequence[Command], changes_files: bool, is_asking: bool
    ) -> list[Any]:
        all_commands = [("ASKING",), *commands] if is_asking else commands
        try:
            pool = self._known_cluster().get_redis_connection(node).connection_pool
            replies = self._send_to(pool, f"{node.host}:{node.port}", all_commands, changes_files)
        except (NoConnectionError, NoResponseError):
            self._is_cluster_changed = True  # another node may have replaced it
            raise
        return replies[1:] if is_asking else replies

    def _send_to(
        self, pool: ConnectionPool, address: str, commands: Sequence[Command], changes_files: bool
    ) -> list[Any]:
        try:
            connection = pool.get_connection()
        except CLIENT_ERRORS as error:
            raise NoConnectionError(address, error) from None
        try:
            if changes_files and connection not in self._checked:
                if self._check.commands:
                    self._check_durability(connection, address)
                self._checked.add(connection)
            try:
                return _exchange(connection, commands)
            except CLIENT_ERRORS as error:
                raise NoResponseError(address, error) from None
        finally:
            pool.release(connection)

    def _check_durability(self, connection: Connection, address: str) -> None:
        try:
            replies = _exchange(connection, self._check.commands)
        except CLIENT_ERRORS as error:
            raise NoConnectionError(address, error) from None  # the commands were not sent
        self._check.verify(replies)

    def _server(self) -> ConnectionPool:
        with self._lock:
            if self._pool is None:
                kind: type[Connection] = TlsConnection if self._location.is_tls else Connection
                self._pool = ConnectionPool(
                    kind,
                    _MAX_CONNECTIONS,
                    host=self._location.host,
                    port=self._location.port,
                    db=self._location.database,
                    retry=Retry(NoBackoff(), 0),
                    redis_connect_func=functools.partial(_greet, self._checked),
                    maint_notifications_config=MaintNotificationsConfig(enabled=False),
                    **self._arguments(),
                )
                self._close_at_end(self._pool.disconnect)
            return self._pool

    def _known_cluster(self) -> RedisCluster:
        with self._lock:
            try:
                if self._cluster is None:
                    self._cluster = self._new_cluster()
                    self._close_at_end(self._cluster.disconnect_connection_pools)
                elif self._is_cluster_changed:
                    start = [(self._location.host, self._location.port)]
                    self._cluster.nodes_manager.initialize(additional_startup_nodes_info=start)
            except CLIENT_ERRORS as error:
                raise NoConnectionError(self._location.address, error) from error
            self._is_cluster_changed = False
            return self._cluster

    def _new_cluster(self) -> RedisCluster:
        if self._location.is_tls:  # the connections of redis-py's cluster have no timeout for the handshake
            single_attempt = Retry(NoBackoff(), 0)
            first = TlsConnection(
                host=self._location.host, port=self._location.port, retry=single_attempt, **self._arguments()
            )
            first.connect()  # type: ignore[no-untyped-call]
            first.disconnect()  # type: ignore[no-untyped-call]
        return RedisCluster(
            self._location.host,
            self._location.port,
            retry=Retry(NoBackoff(), 0),
            redis_connect_func=self._checked.discard,
            maint_notifications_config=MaintNotificationsConfig(enabled=False),
            require_full_coverage=False,
            max_connections=_MAX_CONNECTIONS,
            ssl=self._location.is_tls,
            **self._arguments(),
        )

    def _node_of_keys(self) -> ClusterNode:
        cluster = self._known_cluster()
        try:
            node: ClusterNode = cluster.get_node_from_key(self._location.index_key.decode())
        except CLIENT_ERRORS as error:
            self._is_cluster_changed = True
            raise NoConnectionError(self._location.address, error) from error
        return node

    def _redirect_node(self, moved: AskError) -> ClusterNode:
        """Return the node to which a response redirects. Raise NoConnectionError if it is unknown."""
        cluster = self._known_cluster()
        try:
            if isinstance(moved, MovedError):
                cluster.nodes_manager.move_slot(moved)
            node: ClusterNode | None = cluster.get_node(host=moved.host, port=moved.port)
            if node is None:
                cluster.nodes_manager.initialize(additional_startup_nodes_info=[(moved.host, moved.port)])
                node = cluster.get_node(host=moved.host, port=moved.port)
        except CLIENT_ERRORS as error:
            self._is_cluster_changed = True
            raise NoConnectionError(self._location.address, error) from error
        if node is None:
            raise NoConnectionError(f"{moved.host}:{moved.port}", moved)
        return node

    def _close_at_end(self, close: Callable[[], None]) -> None:
        """Close connections when this client is garbage-collected."""
        finalizer = finalize(self, close)
        finalizer.atexit = False  # background work may still use them at interpreter exit
        self._finalizers.append(finalizer)

    def _arguments(self) -> dict[str, Any]:
        settings = self._settings
        arguments: dict[str, Any] = {
            "username": settings.username,
            "password": settings.password,
            "socket_connect_timeout": settings.connect_timeout_seconds,
            "socket_timeout": settings.read_timeout_seconds,
            "socket_keepalive": True,
            "protocol": 3,  # its greeting contains the role of the server
            "driver_info": None,
        }
        if self._location.is_tls:
            arguments |= {
                "ssl_ca_certs": settings.tls_ca_file,
                "ssl_certfile": settings.tls_client_pem_file,
                "ssl_keyfile": settings.tls_client_pem_file,
            }
        return arguments


def _greet(checked: WeakSet[Connection], connection: Connection) -> None:
    """Start a session, and reject replicas. The durability of the server must be verified again."""
    checked.discard(connection)
    connection.on_connect()
    handshake: Mapping[Any, Any] = connection.handshake_metadata or {}
    if handshake.get(b"role") != b"master":
        raise ReadOnlyError("You can't use a read only replica, whose files may be old.")


def _exchange(connection: Connection, commands: Sequence[Command]) -> list[Any]:
    """Send commands and read their replies. Close the connection if replies remain unread."""
    try:
        connection.send_packed_command(connection.pack_commands(commands), check_health=False)
        replies: list[Any] = []
        for _ in commands:
            try:
                replies.append(connection.read_response())
            except (ResponseError, AuthenticationError, BusyLoadingError) as error:
                replies.append(error)
                if not connection.is_connected:  # redis-py disconnects after some errors
                    return replies + [error] * (len(commands) - len(replies))
    except BaseException:
        connection.disconnect()
        raise
    return replies
