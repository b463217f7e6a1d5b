"""Server settings: the lakehouses, authentication, TLS, and request limits."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.storage.delegation import DelegationSettings
from trinitylake_ops.storage.http.settings import is_loopback
from trinitylake_ops.storage.options import ALLOWED_ROOTS, StorageOptions

#: The name of a server's only lakehouse, which is omitted from the names of its warehouses.
ONLY = ""
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_KNOWN = frozenset({"root", "storage_options", "allowed_roots", "files"})
_OF_FILES = frozenset({"role", "seconds", "sts_endpoint", "sign", "downscope", "create_only"})
_MAX_FILE_BYTES = 1 << 20
_SHOWN_CHARS = 64


@dataclass(frozen=True, slots=True)
class LakehouseSettings:
    """Settings for one served lakehouse."""

    #: The URI of its root.
    root: str
    #: The options of its storage.
    storage_options: StorageOptions
    #: How clients get access to table files.
    files: DelegationSettings = field(default_factory=DelegationSettings)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a single request, and of all concurrent requests."""

    #: The maximum size of a request body.
    body_bytes: int = 16 << 20
    #: The maximum total size of all request bodies in memory.
    bodies_bytes: int = 256 << 20
    #: The maximum total size of responses that clients have not read yet, not counting the newest response.
    unread_bytes: int = 512 << 20
    #: How long a client may take to send a request head.
    head_seconds: float = 30.0
    #: How long a connection without requests stays open.
    idle_seconds: float = 75.0
    #: How long clients may take to send a body or to read a response after the server has begun to stop.
    stop_seconds: float = 10.0
    #: The maximum number of names on one page of a list.
    page_names: int = 1_000
    #: How long a request may run before the client gets an error; the work continues. Also limits how long a client may
    #: take to send a body, and to read a response.
    seconds: float = 300.0
    #: The maximum number of concurrent reads, and of concurrent changes.
    threads: int = 32
    #: The maximum number of requests that wait for a thread or in a table's queue.
    waiting: int = 1_000
    #: The maximum number of data files in one response of scan planning.
    scan_files: int = 2_000


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """All settings of a server.

    Without ``tokens`` and ``issuers``, every client may read and, with ``anonymous_writes``, write. :meth:`check`
    allows this on loopback addresses only.
    """

    #: The lakehouses, by name. A single lakehouse may have the name ``ONLY``.
    lakehouses: Mapping[str, LakehouseSettings]
    #: The address to listen on.
    host: str = "127.0.0.1"
    #: The port to listen on; 0 picks a free port.
    port: int = 8181
    #: The token file.
    tokens: Path | None = None
    #: Whether clients without a token may write.
    anonymous_writes: bool = False
    #: The TLS certificate, as a PEM file.
    tls_certificate: Path | None = None
    #: The key of the TLS certificate, as a PEM file.
    tls_key: Path | None = None
    #: Whether a proxy in front of the server terminates TLS.
    behind_proxy: bool = False
    #: The request limits.
    limits: Limits = field(default_factory=Limits)
    #: The file of trusted token issuers.
    issuers: Path | None = None

    @property
    def has_tokens(self) -> bool:
        """Whether clients need a token."""
        return self.tokens is not None or self.issuers is not None

    def check(self) -> None:
        """Raise InvalidInputError if other machines would have access without a token, or send tokens in clear text."""
        if self.anonymous_writes and self.has_tokens:
            raise InvalidInputError("anonymous writes cannot be combined with a token file; use only one of them")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise InvalidInputError("TLS needs both a certificate and a key; provide both files, or neither")
        if is_loopback(self.host):
            return
        if not self.has_tokens:
            raise InvalidInputError(
                f"address {self.host[:_SHOWN_CHARS]!r} is reachable from other machines, but the server has no token"
                " file; pass --tokens FILE, or listen on a loopback address such as 127.0.0.1"
            )
        if self.tls_certificate is None and not self.behind_proxy:
            raise InvalidInputError(
                f"address {self.host[:_SHOWN_CHARS]!r} is reachable from other machines, but tokens would be sent"
                " without TLS; pass --tls-certificate and --tls-key, or --behind-proxy if a proxy terminates TLS"
            )


def read_lakehouses(path: Path) -> dict[str, LakehouseSettings]:
    """Read the lakehouses from a YAML file, by name. Raises InvalidInputError.

    The file contains a mapping ``lakehouses`` of names to settings: ``root``, and optionally ``storage_options`` and
    ``files`` (mappings), and ``allowed_roots`` (a list).
    """
    content = read_yaml(path, "lakehouses")
    if not isinstance(content, dict) or not content:
        raise InvalidInputError(f"{str(path)!r}: 'lakehouses' must be a mapping of names to settings", path=str(path))
    return {name: _lakehouse(path, name, raw) for name, raw in content.items()}


def _lakehouse(path: Path, name: Any, raw: Any) -> LakehouseSettings:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidInputError(
            f"{str(path)!r}: {str(name)[:64]!r} is not a valid lakehouse name; use up to 63 of a-z, 0-9, '_' and '-'"
        )
    where = f"{str(path)!r}: lakehouse {name!r}"
    if not isinstance(raw, dict) or not raw.keys() <= _KNOWN or not isinstance(raw.get("root"), str):
        raise InvalidInputError(
            f"{where} must be a mapping with root, and optionally storage_options, allowed_roots, files"
        )
    options, roots = raw.get("storage_options", {}), raw.get("allowed_roots", [])
    if not isinstance(options, dict) or not isinstance(roots, list) or not all(isinstance(root, str) for root in roots):
        raise InvalidInputError(
            f"{where}: storage_options must be a mapping of strings, and allowed_roots a list of URIs"
        )
    if roots:
        options = {**options, ALLOWED_ROOTS: " ".join(roots)}
    return LakehouseSettings(raw["root"], StorageOptions(options), _files(where, raw.get("files", {})))


def _files(where: str, raw: Any) -> DelegationSettings:
    if not isinstance(raw, dict) or not raw.keys() <= _OF_FILES:
        raise InvalidInputError(
            f"{where}: files must be a mapping with only these keys: {', '.join(sorted(_OF_FILES))}"
        )
    defaults = DelegationSettings()
    for name, value in raw.items():
        if type(value) is not type(getattr(defaults, name)):
            raise InvalidInputError(f"{where}: files.{name} must be of type {type(getattr(defaults, name)).__name__}")
    try:
        return DelegationSettings(**raw)
    except InvalidInputError as error:
        raise InvalidInputError(f"{where}, files: {error}") from None


class _DoubledKeyError(yaml.constructor.ConstructorError):  # type: ignore[misc] # PyYAML has no types
    """A mapping contains the same key twice."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Rejects duplicate keys, because the last value would win, and the first one may be a restriction."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        """Return a mapping. Raises _DoubledKeyError, and ConstructorError."""
        keys = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for at, (key, _) in enumerate(node.value):
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in keys[:at]:
                raise _DoubledKeyError(None, None, "duplicate key", key.start_mark)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path, key: str) -> Any:
    """Read an operator's YAML file, and return the value of its only top-level key.

    Args:
        path: The file.
        key: The top-level key.

    Raises:
        InvalidInputError: If the file is not usable. The message quotes no content, which may be secret.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a named pipe would block
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise InvalidInputError(f"{str(path)!r} is not a regular file", path=str(path))
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidInputError(f"cannot read {str(path)!r}: {error.strerror}", path=str(path)) from error
    if len(data) > _MAX_FILE_BYTES:
        raise InvalidInputError(f"{str(path)!r} is larger than {_MAX_FILE_BYTES} bytes", path=str(path))
    try:
        content = yaml.load(data, _Loader)
    except (
        yaml.YAMLError,
        ValueError,
        OverflowError,
        RecursionError,
    ) as error:  # the latter for invalid timestamps and numbers
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f", line {mark.line + 1}"
        problem = "contains a duplicate key" if isinstance(error, _DoubledKeyError) else "is not valid YAML"
        raise InvalidInputError(f"{str(path)!r} {problem}{where}", path=str(path)) from None
    if not isinstance(content, dict) or list(content) != [key]:
        raise InvalidInputError(f"{str(path)!r} must contain a mapping with the single key {key!r}", path=str(path))
    return content[key]
