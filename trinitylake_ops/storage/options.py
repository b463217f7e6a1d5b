"""Options of storages: the specification of each option, and the strings that users give by name."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from enum import Enum, auto
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.storage.interface import WHOLE_FILE_LIMIT_BYTES

T = TypeVar("T")

#: The environment variable with options that neither the command line nor the code gives.
OPTIONS_VARIABLE = "TRINITYLAKE_STORAGE_OPTIONS"

_HIDDEN = "***"
# Names are short and have only these letters, so that a credential in their place is seldom taken for one.
_NAME = re.compile(r"(?:[a-z][a-z0-9+-]{0,15}\.)?[a-z][a-z0-9_]{0,39}")
#: Names of options whose values are credentials, including options of other packages.
_SECRET_NAME = re.compile(r"(?s)(?:.*_)?(?:connection_string|credentials?|key|password|secret|token)(?:_.*)?")
_SECRET_ASSIGNMENT = re.compile(
    r"((?:connection_string|credentials?|password|secret_\w{1,40}|_secret|_key_id|(?:access|account|api|private)_key"
    r"|_token)['\"]?\s*[=:]\s*)[^\s,]+"
)
# A path made of a URI has only one of the two slashes. The keys of Azure's accounts hold slashes and end in "==".
_USER_INFO = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,39}:/{1,2})(?:[^/\s@'\"]+|[^\s@'\"]+==)@")
#: Before the account of Azure stands a container.
_CONTAINER_AT_ACCOUNT = re.compile(r"abfss?:/{1,2}[a-z0-9-]{3,63}@")
#: Parts of a connection string or signature of Azure that are secret by themselves.
_SECRET_PARTS = re.compile(r"(?i)(?:^|[;&?])(?:accountkey|sig)=([^;&\s]+)")
#: Environment variables whose values are credentials. A variable that ends in CREDENTIALS contains the path of a file.
_SECRET_VARIABLE = re.compile(r"(?i)(?:.*_)?(?:CONNECTION_STRING|KEY|KEY_ID|PASSWORD|SECRET|TOKEN)")
_MIN_SECRET_CHARS = 6
#: What an option that is a word, a number or a flag may look like. Anything else may be a credential in its place.
_WORD = re.compile(r"[\w.+-]{0,20}", re.ASCII)
_MAX_DIGITS = 18
_NO_CONTROL_CHARACTER = re.compile(r"[^\x00-\x1f\x7f]+")
_NO_WHITE_SPACE = re.compile(r"[^\x00-\x20\x7f]+")
#: Any text at all, including an empty one.
ANY_TEXT = re.compile(r"(?s).*")


class Kind(Enum):
    """The kind of the values of an option."""

    TEXT = auto()
    #: A text that fits into a header or an address: without white space.
    TOKEN = auto()
    FLAG = auto()
    CHOICE = auto()
    NUMBER = auto()
    INTEGER = auto()
    URL = auto()


@dataclass(frozen=True, slots=True)
class Option:
    """The specification of one option of a storage.

    Settings, checks, redaction, Dagster's configuration and the documentation are generated from it. A credential has a
    name that marks it as one (``is_secret``), because text is redacted where no specification is known.

    Raises InvalidInputError if ``is_secret`` does not agree with the name.
    """

    name: str
    #: What the option is for: plain text that begins in lower case, without a final period.
    help: str
    kind: Kind = Kind.TEXT
    #: The typed value of an option that is missing. None: the storage or the environment decides.
    default: str | float | None = None
    #: The words of a CHOICE.
    choices: tuple[str, ...] = ()
    #: The least value of a NUMBER or INTEGER.
    minimum: float = 0
    #: The greatest value of a NUMBER or INTEGER.
    maximum: float = sys.float_info.max
    #: The expression that a TEXT, TOKEN or URL must match as a whole.
    pattern: re.Pattern[str] | None = None
    #: What a value that matches the pattern is: error messages and documentation continue "must be" with it.
    form: str = ""
    #: Whether the values are credentials, which no text may repeat.
    is_secret: bool = False
    #: Environment variables that give the value where no option does; the first that is not empty counts.
    environment: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.is_secret != is_secret(self.name):
            raise InvalidInputError(
                f"storage option {self.name!r} cannot be specified: is_secret={self.is_secret} does not agree with its"
                " name; only names of credentials contain a word such as 'key', 'password', 'secret' or 'token'"
            )

    @property
    def accepted(self) -> str:
        """The accepted values in words."""
        if self.form:
            return self.form
        if self.kind is Kind.FLAG:
            return "'true' or 'false'"
        if self.kind is Kind.CHOICE:
            return f"one of {', '.join(self.choices)}"
        if self.kind is Kind.NUMBER:
            return f"a number {self._limits('g')}"
        if self.kind is Kind.INTEGER:
            return f"a whole number {self._limits('.0f')}"
        if self.kind is Kind.URL:
            return "http://HOST[:PORT] or https://HOST[:PORT], without credentials"
        return f"text without {'white space and ' if self.kind is Kind.TOKEN else ''}control characters"

    def parse(self, text: str) -> Any:
        """Return the typed value of a text: str, bool, float or int.

        Raises InvalidInputError for a text that is not accepted. The message repeats it only if it is a short word.
        """
        value: Any = text
        if self.kind is Kind.FLAG:
            is_valid, value = text in ("true", "false"), text == "true"
        elif self.kind is Kind.CHOICE:
            is_valid = text in self.choices
        elif self.kind in (Kind.NUMBER, Kind.INTEGER):
            value = _number(text, self.kind)
            is_valid = value is not None and self.minimum <= value <= self.maximum
        elif self.kind is Kind.URL:
            is_valid = is_server_url(text) and (self.pattern is None or bool(self.pattern.fullmatch(text)))
        else:
            pattern = _NO_WHITE_SPACE if self.kind is Kind.TOKEN else _NO_CONTROL_CHARACTER
            is_valid = bool((self.pattern or pattern).fullmatch(text))
        if is_valid:
            return value
        if self.kind not in (Kind.TEXT, Kind.TOKEN, Kind.URL):
            raise InvalidInputError(f"storage option {self.name!r} must be {self.accepted}, not {quoted(text)}")
        if not text:
            raise InvalidInputError(f"storage option {self.name!r} is empty: leave it out, or give a value")
        # The text is not repeated, because it may be a credential.
        raise InvalidInputError(f"storage option {self.name!r} must be {self.accepted}")

    def value(self, options: Mapping[str, str]) -> Any:
        """Return the typed value among options by their plain names, or the default.

        Raises InvalidInputError as ``parse`` does.
        """
        text = options.get(self.name)
        return self.default if text is None else self.parse(text)

    def from_environment(self) -> str:
        """Return the text that the environment gives, which is empty if it gives none."""
        return next(filter(None, (os.environ.get(variable) for variable in self.environment)), "")

    def _limits(self, form: str) -> str:
        if self.maximum == sys.float_info.max:
            return f"of at least {self.minimum:{form}}"
        return f"from {self.minimum:{form}} to {self.maximum:{form}}"


def read_settings(kind: type[T], specs: Iterable[Option], options: Mapping[str, str], **computed: Any) -> T:
    """Build the settings of a storage from its options.

    Args:
        kind: a dataclass; each of its fields has the name of an option or of a computed value.
        specs: the options of the storage. All of them are checked, including those that no field holds.
        options: texts by the plain names of options.
        computed: values that take the place of those of options.

    Raises:
        InvalidInputError: for a value that its option does not accept.
    """
    values = {spec.name: spec.value(options) for spec in specs} | computed
    return kind(**{field.name: values[field.name] for field in fields(kind)})  # type: ignore[arg-type]


def quoted(value: str) -> str:
    """Return a value that an option does not accept as messages show it, or that it is not shown."""
    return repr(value) if _WORD.fullmatch(value) else "a text that is not shown, as it may be a credential"


def is_secret(name: str) -> bool:
    """Whether the value of an option is a credential. No text that this package makes repeats it."""
    return _SECRET_NAME.fullmatch(name.rpartition(".")[2]) is not None


def is_server_url(value: str) -> bool:
    """Whether a text is the URL of a server, without credentials, query and fragment."""
    try:
        parts = urlsplit(value)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and (parts.port is None or parts.port > 0)
            and "@" not in parts.netloc
            and not (parts.query or parts.fragment or re.search(r"[\s\x00-\x1f\x7f]", value))
        )
    except ValueError:
        return False


def _number(text: str, kind: Kind) -> float | None:
    if kind is Kind.INTEGER:
        return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS else None
    try:
        return float(text)
    except ValueError:
        return None


#: Roots that may be read and written beyond the lakehouse's own: URIs with white space between them.
ALLOWED_ROOTS = "allowed_roots"

#: The most bytes of a file that is read whole, if its kind has no bound of its own.
WHOLE_FILE_LIMIT = Option(
    "whole_file_limit_bytes",
    "the largest node or root that is read, in bytes; other kinds of files have their own limits. Raise it where"
    " another program wrote larger nodes",
    Kind.INTEGER,
    default=WHOLE_FILE_LIMIT_BYTES,
    minimum=WHOLE_FILE_LIMIT_BYTES,
    maximum=5 << 30,  # the largest file of one PUT to S3
)
CACHE_BYTES = Option(
    "cache_bytes", "memory for immutable files, in bytes; 0 keeps none", Kind.INTEGER, default=256 << 20
)
CACHE_FOLDER = Option(
    "cache_folder",
    "folder on the local disk that keeps immutable files for all processes and later runs; it must not be within the"
    " lakehouse",
    pattern=re.compile(r"[^\0]+"),
    form="the path of a folder",
)
CACHE_FOLDER_BYTES = Option(
    "cache_folder_bytes", "size of the cache folder, in bytes; 0 keeps none", Kind.INTEGER, default=1 << 30
)
#: Options of every root that decide what is cached, not how the root is reached.
CACHE_OPTIONS = (CACHE_BYTES, CACHE_FOLDER, CACHE_FOLDER_BYTES)
#: Options that every root accepts.
COMMON_OPTIONS = (
    Option(
        ALLOWED_ROOTS,
        "further roots that may be read, and where tables of others may be written, such as those of registered tables",
        pattern=ANY_TEXT,
        form="URIs with white space between them",
    ),
    WHOLE_FILE_LIMIT,
    *CACHE_OPTIONS,
)


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
        """Return the options of a text ``NAME=VALUE,NAME=VALUE``; an empty text has none.

        Raises InvalidInputError, which repeats no value.
        """
        options: dict[str, str] = {}
        for part in filter(None, map(str.strip, text.split(","))):
            name, equals, value = part.partition("=")
            if not equals:
                raise InvalidInputError("storage options are written as NAME=VALUE, several as NAME=VALUE,NAME=VALUE")
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
        variables = (value for name, value in os.environ.items() if _SECRET_VARIABLE.fullmatch(name))
        secrets.update(value for value in variables if len(value) >= _MIN_SECRET_CHARS)
        parts = {part for secret in secrets for part in _SECRET_PARTS.findall(secret)}
        secrets |= parts | {unquote(part) for part in parts}
        for secret in sorted(secrets, key=len, reverse=True):
            text = text.replace(secret, _HIDDEN)
        return text


def redact_assignments(text: str) -> str:
    """Return a text without parts that may be credentials by their place. Asterisks replace them.

    Such parts are values of names that mean a credential, ``NAME=VALUE``, and the text before the host of a URI.
    """
    return _USER_INFO.sub(_without_user, _SECRET_ASSIGNMENT.sub(rf"\1{_HIDDEN}", text))


def _without_user(found: re.Match[str]) -> str:
    return found[0] if _CONTAINER_AT_ACCOUNT.fullmatch(found[0]) else f"{found[1]}{_HIDDEN}@"
