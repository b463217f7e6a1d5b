"""Options of a storage: strings by name, some of them secret."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import unquote

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.storage.interface import WHOLE_FILE_LIMIT_BYTES

#: Options of our own whose values are credentials.
SECRET_OPTIONS = frozenset(
    {
        "access_key_id", "account_key", "connection_string", "credentials", "password", "sas_token",
        "secret_access_key", "session_token",
    }
)  # fmt: skip
#: Words in names of options, also of other packages, that make the value a credential.
_SECRET_WORDS = frozenset({"credential", "credentials", "key", "password", "secret", "token"})

#: The environment variable with options that neither the command line nor the code gives.
OPTIONS_VARIABLE = "TRINITYLAKE_STORAGE_OPTIONS"

#: Roots that may be read and written beyond the lakehouse's own: URIs with white space between them.
ALLOWED_ROOTS = "allowed_roots"

#: The most bytes of a file that is read whole, if its kind has no bound of its own.
WHOLE_FILE_LIMIT = "whole_file_limit_bytes"

_HIDDEN = "***"
# Names are short and have only these letters, so that a credential in their place is seldom taken for one.
_NAME = re.compile(r"(?:[a-z][a-z0-9+-]{0,15}\.)?[a-z][a-z0-9_]{0,39}")
_SECRET_ASSIGNMENT = re.compile(rf"({'|'.join(sorted(SECRET_OPTIONS))})(['\"]?\s*[=:]\s*)[^\s,]+")
# A path made of a URI has only one of the two slashes. The keys of Azure's accounts hold slashes and end in "==".
_USER_INFO = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,39}:/{1,2})(?:[^/\s@'\"]+|[^\s@'\"]+==)@")
#: Before the account of Azure stands a container.
_CONTAINER_AT_ACCOUNT = re.compile(r"abfss?:/{1,2}[a-z0-9-]{3,63}@")
#: Parts of a connection string or signature of Azure that are secret by themselves.
_SECRET_PARTS = re.compile(r"(?i)(?:^|[;&?])(?:accountkey|sig)=([^;&\s]+)")
_ENVIRONMENT_SECRETS = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_CLIENT_SECRET",
    "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_SAS_TOKEN", "REDIS_PASSWORD",
)  # fmt: skip
_MIN_SECRET_CHARS = 6
#: What an option that is a word, a number or a flag may look like. Anything else may be a credential in its place.
_WORD = re.compile(r"[\w.+-]{0,20}", re.ASCII)
_LARGEST_WHOLE_FILE_BYTES = 5 << 30  # the largest file of one PUT to S3


def quoted(value: str) -> str:
    """Return a value that an option does not take, as messages show it, or that it is not shown."""
    return repr(value) if _WORD.fullmatch(value) else "a text that is not shown, as it may be a credential"


def is_secret(name: str) -> bool:
    """Whether the value of an option is a credential. No text that this package makes repeats it."""
    plain = name.rpartition(".")[2]
    return plain in SECRET_OPTIONS or not _SECRET_WORDS.isdisjoint(plain.split("_"))


class StorageOptions(Mapping[str, str]):
    """An immutable mapping of option names to strings whose text forms hide credentials.

    ``SCHEME.NAME`` is the option of that name for all roots of this scheme. ``NAME`` is that for roots of the scheme of
    the lakehouse. So a catalog and the files of its tables may stand on two kinds of storage.

    It pickles with the credentials, since Spark's tasks need them. It compares and hashes by content. Raises
    InvalidInputError for a name or value that is no string, and for a name that no option has.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, str] | None = None):
        self._values: dict[str, str] = dict(values or {})
        given: Iterable[tuple[object, object]] = self._values.items()
        for name, value in given:
            if not (isinstance(name, str) and isinstance(value, str)):
                raise InvalidInputError(f"storage option {name!r} must be a string, not a {type(value).__name__}")
            if not _NAME.fullmatch(name):
                raise InvalidInputError(
                    "a storage option has a name that is not shown, as it may be a credential;"
                    " names are words such as 'endpoint'"
                )

    @classmethod
    def parse(cls, text: str) -> StorageOptions:
        """Return the options of a text ``K=V,K=V``; an empty text has none.

        Raises InvalidInputError, which repeats no value.
        """
        options: dict[str, str] = {}
        for part in filter(None, map(str.strip, text.split(","))):
            name, equals, value = part.partition("=")
            if not equals:
                raise InvalidInputError("storage options are written as K=V, several as K=V,K=V")
            options[name] = value
        return cls(options)

    def __getitem__(self, name: str) -> str:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return f"StorageOptions({self.shown()!r})"

    def __reduce__(self) -> tuple[type[StorageOptions], tuple[dict[str, str]]]:
        return (StorageOptions, (self._values,))

    def of_scheme(self, scheme: str, *, is_own: bool = True) -> StorageOptions:
        """Return the options of one kind of storage by their plain names.

        With ``is_own`` those without a scheme are among them. One with the scheme comes before one without.
        """
        prefix = f"{scheme}."
        plain = {name: value for name, value in self._values.items() if is_own and "." not in name}
        named = {name.removeprefix(prefix): value for name, value in self._values.items() if name.startswith(prefix)}
        return StorageOptions({**plain, **named})

    def beyond(self, own_root: str, other_root: str) -> StorageOptions | None:
        """Return the options for another root than the lakehouse's. None where there are none: the environment decides.

        Those with a scheme stay, as the other root may lead to further ones.
        """
        scheme, own_scheme = (root.partition("://")[0] for root in (other_root, own_root))
        if scheme == own_scheme:
            return self
        further = {name: value for name, value in self._values.items() if "." in name}
        return StorageOptions(further) if further else None

    def on_top_of(self, others: Mapping[str, str]) -> StorageOptions:
        """Return these options with others below them, such as those that the environment gives."""
        return StorageOptions({**others, **self._values})

    def shown(self) -> dict[str, str]:
        """Return the options as people may see them: credentials as asterisks."""
        return {name: _HIDDEN if is_secret(name) else value for name, value in self._values.items()}

    def redact(self, text: str) -> str:
        """Return a text without the credentials of these options and of the environment.

        A server's or a client library's message may contain them.
        """
        secrets = {value for name, value in self._values.items() if is_secret(name) and value}
        from_environment = (os.environ.get(name, "") for name in _ENVIRONMENT_SECRETS)
        secrets.update(value for value in from_environment if len(value) >= _MIN_SECRET_CHARS)
        parts = {part for secret in secrets for part in _SECRET_PARTS.findall(secret)}
        secrets |= parts | {unquote(part) for part in parts}
        for secret in sorted(secrets, key=len, reverse=True):
            text = text.replace(secret, _HIDDEN)
        return text

    def flag(self, name: str, *, default: bool) -> bool:
        """Return an option that is ``true`` or ``false``. Raises InvalidInputError for anything else."""
        value = self.get(name)
        if value is None:
            return default
        if value not in ("true", "false"):
            raise InvalidInputError(f"storage option {name!r} must be 'true' or 'false', not {quoted(value)}")
        return value == "true"

    def one_of(self, name: str, allowed: tuple[str, ...]) -> str:
        """Return an option that takes one of several words, by default the first. Raises InvalidInputError."""
        value = self.get(name, allowed[0])
        if value not in allowed:
            raise InvalidInputError(f"storage option {name!r} must be one of {', '.join(allowed)}, not {quoted(value)}")
        return value

    def number(self, name: str, *, default: float, minimum: float = 0, maximum: float = sys.float_info.max) -> float:
        """Return an option that is a number from ``minimum`` to ``maximum``. Raises InvalidInputError."""
        value = self.get(name)
        if value is None:
            return default
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if not minimum <= number <= maximum:
            allowed = (
                f"of at least {minimum:g}" if maximum == sys.float_info.max else f"from {minimum:g} to {maximum:g}"
            )
            raise InvalidInputError(f"storage option {name!r} must be a number {allowed}, not {quoted(value)}")
        return number


def whole_file_limit_bytes(options: StorageOptions) -> int:
    """Return the most bytes of a file that is read whole. Raises InvalidInputError."""
    return int(
        options.number(
            WHOLE_FILE_LIMIT,
            default=WHOLE_FILE_LIMIT_BYTES,
            minimum=WHOLE_FILE_LIMIT_BYTES,
            maximum=_LARGEST_WHOLE_FILE_BYTES,
        )
    )


def redact_assignments(text: str) -> str:
    """Return a text without parts that may be credentials by their place. Asterisks replace them.

    Such parts are values of names that mean a credential, ``NAME=VALUE``, and the text before the host of a URI.
    """
    return _USER_INFO.sub(_without_user, _SECRET_ASSIGNMENT.sub(rf"\1\2{_HIDDEN}", text))


def _without_user(found: re.Match[str]) -> str:
    return found[0] if _CONTAINER_AT_ACCOUNT.fullmatch(found[0]) else f"{found[1]}{_HIDDEN}@"
