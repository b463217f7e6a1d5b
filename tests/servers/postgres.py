"""A temporary Postgres server on loopback. It runs as another user if tests run as root."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg2

from tests.servers.daemons import START_TIMEOUT_SECONDS, ServerStartError, die_with_parent, log_tail, run

_USER = "postgres"  # a system user, because the server does not run as root
_STOP_TIMEOUT_SECONDS = 20
#: Temporary data does not need to be synced to disk.
_SETTINGS = (
    "fsync=off", "full_page_writes=off", "synchronous_commit=off", "dynamic_shared_memory_type=mmap",
    "listen_addresses=127.0.0.1", "unix_socket_directories=",
)  # fmt: skip


@dataclass(frozen=True)
class Postgres:
    """A database of a running server."""

    port: int
    database: str
    user: str
    password: str

    def dump(self) -> str:
        """Return the content of the server as text."""
        command = [
            str(binary("pg_dumpall")), "--host", "127.0.0.1", "--port", str(self.port), "--username", self.user,
        ]  # fmt: skip
        environment = {**os.environ, "PGPASSWORD": self.password}
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=60).stdout

    def connect(self) -> psycopg2.extensions.connection:
        return psycopg2.connect(
            host="127.0.0.1", port=self.port, user=self.user, password=self.password, dbname=self.database
        )


def binary(name: str) -> Path:
    """Return the path of a program of the newest installed Postgres. Raises ServerStartError."""
    programs = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[-3]))
    if not programs:
        raise ServerStartError(f"{name} is not installed: it comes with the packages of deploy/debian-packages.txt")
    return programs[-1]


@contextmanager
def postgres(server: Postgres, command: Sequence[str], log: Path) -> Iterator[None]:
    """Create a database and serve it while the block runs, with a command such as ``postgres -p PORT``."""
    folder = Path(tempfile.mkdtemp(prefix="trinitylake-postgres-"))
    try:
        data = _make_database(server, folder, log)
        settings = [argument for setting in _SETTINGS for argument in ("-c", setting)]
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*_as_user("--pdeathsig", "QUIT"), str(binary(command[0])), *command[1:], "-D", str(data), *settings],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=folder,
                preexec_fn=None if _is_root() else die_with_parent,  # noqa: PLW1509 - one system call, without a lock
            )  # fmt: skip
        try:
            _wait_until_ready(server, process, log)
            yield
        finally:
            process.send_signal(signal.SIGQUIT)  # immediate shutdown, including its children
            try:
                process.wait(_STOP_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_root() -> bool:
    return os.geteuid() == 0


def _as_user(*options: str) -> list[str]:
    """Return a command prefix that switches to a user as which Postgres can run."""
    if not _is_root():
        return []
    return ["setpriv", "--reuid", _USER, "--regid", _USER, "--clear-groups", *options]


def _make_database(server: Postgres, folder: Path, log: Path) -> Path:
    data, password = folder / "data", folder / "password"
    password.write_text(server.password)
    if _is_root():
        user = pwd.getpwnam(_USER)
        for path in (folder, password):
            os.chown(path, user.pw_uid, user.pw_gid)
    run(
        [
            *_as_user(), str(binary("initdb")), "--pgdata", str(data), "--username", server.user,
            "--pwfile", str(password), "--auth", "scram-sha-256", "--encoding", "UTF8", "--no-locale", "--no-sync",
            "--no-instructions",
        ],
        log,
    )  # fmt: skip
    password.unlink()
    # The container image creates the database when it starts. Without the image, it must be created first.
    command = [
        *_as_user(), str(binary("postgres")), "--single", "-D", str(data), "-F", "template1",
    ]  # fmt: skip
    completed = subprocess.run(
        command, input=f'CREATE DATABASE "{server.database}"\n', capture_output=True, text=True, cwd=folder, timeout=60
    )
    if completed.returncode:
        raise ServerStartError(f"the database could not be created: {completed.stderr}")
    return data


def _wait_until_ready(server: Postgres, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while True:
        try:
            server.connect().close()
        except psycopg2.OperationalError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise ServerStartError(f"Postgres does not respond: {error}; its log:\n{log_tail(log)}") from error
            time.sleep(0.05)
        else:
            return
