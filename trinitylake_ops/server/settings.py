"""What the operator of a server decides: its lakehouses, who may do what, and the limits of a request."""

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

#: The name of the only lakehouse of a server. Warehouses of it are named without it.
ONLY = ""
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_KNOWN = frozenset({"root", "storage_options", "allowed_roots", "files"})
_OF_FILES = frozenset({"role", "seconds", "sts_endpoint", "sign", "downscope", "create_only"})
_MAX_FILE_BYTES = 1 << 20
_SHOWN_CHARS = 64


@dataclass(frozen=True, slots=True)
class LakehouseSettings:
    """A lakehouse that is served: its root, options of its storage, and what clients get to reach files of tables."""

    root: str
    storage_options: StorageOptions
    files: DelegationSettings = field(default_factory=DelegationSettings)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a request, and of all that are served at a time.

    ``body_bytes`` is the largest body, and ``bodies_bytes`` bounds all that are there at a time. ``unread_bytes``
    bounds all responses that clients have not read, except the newest one. ``page_names`` is the longest page of a
    list, ``scan_files`` the most data files in one answer about a scan. A request that takes longer
    than ``seconds`` is answered, and goes on. So long a client may take to send a body, and to read an answer. For the
    head of a request it has ``head_seconds``, and where the server stops ``stop_seconds`` for all of that. A connection
    without requests stays for ``idle_seconds``. At most ``threads`` reads and as many changes run at a time, and
    ``waiting`` more wait for a thread, or for their turn at a table.
    """

    body_bytes: int = 16 << 20
    bodies_bytes: int = 256 << 20
    unread_bytes: int = 512 << 20
    head_seconds: float = 30.0
    idle_seconds: float = 75.0
    stop_seconds: float = 10.0
    page_names: int = 1_000
    seconds: float = 300.0
    threads: int = 32
    waiting: int = 1_000
    scan_files: int = 2_000


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """All settings of a server. ``lakehouses`` are by name; the only one may have the name ``ONLY``.

    Without a file of tokens, or one of issuers, everybody may read, and with ``anonymous_writes`` also write. That is
    for loopback addresses only, and :meth:`check` refuses anything else.
    """

    lakehouses: Mapping[str, LakehouseSettings]
    host: str = "127.0.0.1"
    port: int = 8181
    tokens: Path | None = None
    anonymous_writes: bool = False
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    behind_proxy: bool = False
    limits: Limits = field(default_factory=Limits)
    issuers: Path | None = None

    @property
    def has_tokens(self) -> bool:
        """Whether only who has a token is let in."""
        return self.tokens is not None or self.issuers is not None

    def check(self) -> None:
        """Raise InvalidInputError for settings that would let strangers in, or send tokens in clear text."""
        if self.anonymous_writes and self.has_tokens:
            raise InvalidInputError("anonymous writes and a file of tokens exclude each other; leave one out")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise InvalidInputError("TLS needs both a certificate and its key; give both files, or neither")
        if is_loopback(self.host):
            return
        if not self.has_tokens:
            raise InvalidInputError(
                f"others can reach {self.host[:_SHOWN_CHARS]!r}, and without a file of tokens everybody is let in;"
                " give --tokens FILE, or a loopback address such as 127.0.0.1"
            )
        if self.tls_certificate is None and not self.behind_proxy:
            raise InvalidInputError(
                f"others can reach {self.host[:_SHOWN_CHARS]!r}, and without TLS they can read the tokens on their way;"
                " give --tls-certificate and --tls-key, or --behind-proxy if a proxy has TLS"
            )


def read_lakehouses(path: Path) -> dict[str, LakehouseSettings]:
    """Return the lakehouses of a YAML file, by their names. Raises InvalidInputError.

    The file has a mapping ``lakehouses`` of names to settings: ``root``, and perhaps ``storage_options``, a mapping,
    and ``allowed_roots``, a list.
    """
    content = read_yaml(path, "lakehouses")
    if not isinstance(content, dict) or not content:
        raise InvalidInputError(f"{str(path)!r}: 'lakehouses' must be a mapping of names to lakehouses", path=str(path))
    return {name: _lakehouse(path, name, raw) for name, raw in content.items()}


def _lakehouse(path: Path, name: Any, raw: Any) -> LakehouseSettings:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidInputError(
            f"{str(path)!r}: {str(name)[:64]!r} is no name of a lakehouse; use up to 63 of a-z, 0-9, '_' and '-'"
        )
    where = f"{str(path)!r}: lakehouse {name!r}"
    if not isinstance(raw, dict) or not raw.keys() <= _KNOWN or not isinstance(raw.get("root"), str):
        raise InvalidInputError(f"{where} must be a mapping with a root, and perhaps storage_options and allowed_roots")
    options, roots = raw.get("storage_options", {}), raw.get("allowed_roots", [])
    if not isinstance(options, dict) or not isinstance(roots, list) or not all(isinstance(root, str) for root in roots):
        raise InvalidInputError(f"{where}: storage_options is a mapping of texts, allowed_roots a list of URIs")
    if roots:
        options = {**options, ALLOWED_ROOTS: " ".join(roots)}
    return LakehouseSettings(raw["root"], StorageOptions(options), _files(where, raw.get("files", {})))


def _files(where: str, raw: Any) -> DelegationSettings:
    if not isinstance(raw, dict) or not raw.keys() <= _OF_FILES:
        raise InvalidInputError(f"{where}: files is a mapping with no other keys than {', '.join(sorted(_OF_FILES))}")
    known = DelegationSettings()
    for name, value in raw.items():
        if type(value) is not type(getattr(known, name)):
            raise InvalidInputError(f"{where}: {name} of files must be a {type(getattr(known, name)).__name__}")
    try:
        return DelegationSettings(**raw)
    except InvalidInputError as error:
        raise InvalidInputError(f"{where}, files: {error}") from None


class _DoubledKeyError(yaml.constructor.ConstructorError):  # type: ignore[misc] # PyYAML has no types
    """A mapping has a key twice."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses a key that is there twice: the first one, perhaps a restriction, would not hold."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        """Return a mapping. Raises _DoubledKeyError, and ConstructorError."""
        keys = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for at, (key, _) in enumerate(node.value):
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in keys[:at]:
                raise _DoubledKeyError(None, None, "a key is there twice", key.start_mark)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path, key: str) -> Any:
    """Return what a YAML file of an operator has under its only key. Raises InvalidInputError, quoting no content."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a named pipe would block
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise InvalidInputError(f"{str(path)!r} is not a regular file", path=str(path))
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidInputError(f"{str(path)!r} cannot be read: {error.strerror}", path=str(path)) from error
    if len(data) > _MAX_FILE_BYTES:
        raise InvalidInputError(f"{str(path)!r} is larger than {_MAX_FILE_BYTES} bytes", path=str(path))
    try:
        content = yaml.load(data, _Loader)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:  # also of times and numbers
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f", line {mark.line + 1}"
        what = "has a key twice" if isinstance(error, _DoubledKeyError) else "is no YAML"
        raise InvalidInputError(f"{str(path)!r} {what}{where}", path=str(path)) from None
    if not isinstance(content, dict) or list(content) != [key]:
        raise InvalidInputError(f"{str(path)!r} must hold one mapping with the key {key!r}", path=str(path))
    return content[key]
