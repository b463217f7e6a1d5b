"""Options of storages: their specifications, their values, and the redaction of credentials."""

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

#: Environment variable with default options.
OPTIONS_VARIABLE = "TRINITYLAKE_STORAGE_OPTIONS"

_HIDDEN = "***"
# Names are short and consist of these characters, so that a credential is rarely mistaken for a name.
_NAME = re.compile(r"(?:[a-z][a-z0-9+-]{0,15}\.)?[a-z][a-z0-9_]{0,39}")
#: Names of options with credentials, including options from other packages.
_SECRET_NAME = re.compile(r"(?s)(?:.*_)?(?:connection_string|credentials?|key|password|secret|token)(?:_.*)?")
_SECRET_ASSIGNMENT = re.compile(
    r"((?:connection_string|credentials?|password|secret_\w{1,40}|_secret|_key_id|(?:access|account|api|private)_key"
    r"|_token)['\"]?\s*[=:]\s*)[^\s,]+"
)
# A URI that was converted to a path has only one slash. Keys of Azure accounts contain slashes and end in "==".
_USER_INFO = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,39}:/{1,2})(?:[^/\s@'\"]+|[^\s@'\"]+==)@")
#: An Azure container before an account, which is not a credential.
_CONTAINER_AT_ACCOUNT = re.compile(r"abfss?:/{1,2}[a-z0-9-]{3,63}@")
#: Secret parts of an Azure connection string or signature.
_SECRET_PARTS = re.compile(r"(?i)(?:^|[;&?])(?:accountkey|sig)=([^;&\s]+)")
#: Environment variables with credentials. A variable that ends in CREDENTIALS contains the path of a file.
_SECRET_VARIABLE = re.compile(r"(?i)(?:.*_)?(?:CONNECTION_STRING|KEY|KEY_ID|PASSWORD|SECRET|TOKEN)")
_MIN_SECRET_CHARS = 6
#: Invalid values that messages may repeat. Anything else may be a credential.
_WORD = re.compile(r"[\w.+-]{0,20}", re.ASCII)
_MAX_DIGITS = 18
_NO_CONTROL_CHARACTER = re.compile(r"[^\x00-\x1f\x7f]+")
_NO_WHITE_SPACE = re.compile(r"[^\x00-\x20\x7f]+")
#: Any text, including empty text.
ANY_TEXT = re.compile(r"(?s).*")


class Kind(Enum):
    """The type of an option's values."""

    TEXT = auto()
    #: Text without white space, for headers and URLs.
    TOKEN = auto()
    FLAG = auto()
    CHOICE = auto()
    NUMBER = auto()
    INTEGER = auto()
    URL = auto()


@dataclass(frozen=True, slots=True)
class Option:
    """The specification of one option of a storage.

    Settings, validation, redaction, Dagster's configuration and the documentation are derived from it. Names of
    credentials are recognized by ``is_secret``, because texts are also redacted where no specification is available.

    Raises InvalidInputError if ``is_secret`` contradicts the name.
    """

    name: str
    #: Description of the option: lower-case text without a trailing period.
    help: str
    kind: Kind = Kind.TEXT
    #: Typed default value. None if the storage or environment variables determine the value.
    default: str | float | None = None
    #: Allowed values of a CHOICE.
    choices: tuple[str, ...] = ()
    #: Minimum of a NUMBER or INTEGER.
    minimum: float = 0
    #: Maximum of a NUMBER or INTEGER.
    maximum: float = sys.float_info.max
    #: Regular expression that the whole TEXT, TOKEN or URL must match.
    pattern: re.Pattern[str] | None = None
    #: Description of valid values, after "must be" in messages and documentation.
    form: str = ""
    #: Whether the value is a credential, which messages must not contain.
    is_secret: bool = False
    #: Environment variables that set the value if the option does not. The first nonempty variable is used.
    environment: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.is_secret != is_secret(self.name):
            raise InvalidInputError(
                f"invalid storage option {self.name!r}: is_secret={self.is_secret} contradicts its name; only names of"
                " credentials contain 'key', 'password', 'secret' or 'token'"
            )

    @property
    def accepted(self) -> str:
        """Description of valid values."""
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
        """Parse a text into a typed value: str, bool, float or int.

        Raise InvalidInputError if it is invalid. The message contains the text only if it is a short word.
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
            raise InvalidInputError(f"storage option {self.name!r} is empty; remove it, or set a value")
        # The message does not contain the text, which may be a credential.
        raise InvalidInputError(f"storage option {self.name!r} must be {self.accepted}")

    def value(self, options: Mapping[str, str]) -> Any:
        """Return the typed value of the option, or the default. Raise InvalidInputError if it is invalid."""
        text = options.get(self.name)
        return self.default if text is None else self.parse(text)

    def from_environment(self) -> str:
        """Return the value that environment variables set, or an empty text."""
        return next(filter(None, (os.environ.get(variable) for variable in self.environment)), "")

    def _limits(self, form: str) -> str:
        if self.maximum == sys.float_info.max:
            return f"of at least {self.minimum:{form}}"
        return f"from {self.minimum:{form}} to {self.maximum:{form}}"


def read_settings(kind: type[T], specs: Iterable[Option], options: Mapping[str, str], **computed: Any) -> T:
    """Build the settings of a storage from its options.

    Args:
        kind: A dataclass, each field of which has the name of an option or of a computed value.
        specs: Options of the storage. All of them are validated, including options without a field.
        options: Option values as text, by plain option name.
        computed: Values that replace option values.

    Raises:
        InvalidInputError: A value is invalid.
    """
    values = {spec.name: spec.value(options) for spec in specs} | computed
    return kind(**{field.name: values[field.name] for field in fields(kind)})  # type: ignore[arg-type]


def quoted(value: str) -> str:
    """Format an invalid value for messages. Hide it if it may be a credential."""
    return repr(value) if _WORD.fullmatch(value) else "a hidden text, which may be a credential"


def is_secret(name: str) -> bool:
    """Whether an option's value is a credential, which messages and logs must not contain."""
    return _SECRET_NAME.fullmatch(name.rpartition(".")[2]) is not None


def is_server_url(value: str) -> bool:
    """Whether a text is the URL of a server, without credentials, query or fragment."""
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


#: Name of the option with additional roots that may be read and written: URIs, separated by white space.
ALLOWED_ROOTS = "allowed_roots"

#: Size limit of files that are read as a whole, unless their kind has a separate limit.
WHOLE_FILE_LIMIT = Option(
    "whole_file_limit_bytes",
    "maximum size of nodes and roots that are read, in bytes; other kinds of files have separate limits. Raise it if"
    " another program wrote larger nodes",
    Kind.INTEGER,
    default=WHOLE_FILE_LIMIT_BYTES,
    minimum=WHOLE_FILE_LIMIT_BYTES,
    maximum=5 << 30,  # the largest file of one PUT to S3
)
CACHE_BYTES = Option(
    "cache_bytes", "memory for caching immutable files, in bytes; 0 disables it", Kind.INTEGER, default=256 << 20
)
CACHE_FOLDER = Option(
    "cache_folder",
    "local folder that caches immutable files for all processes and later runs; it must be outside the lakehouse",
    pattern=re.compile(r"[^\0]+"),
    form="the path of a folder",
)
CACHE_FOLDER_BYTES = Option(
    "cache_folder_bytes", "maximum size of the cache folder, in bytes; 0 disables it", Kind.INTEGER, default=1 << 30
)
#: Options that configure caches. They do not affect how a root is accessed.
CACHE_OPTIONS = (CACHE_BYTES, CACHE_FOLDER, CACHE_FOLDER_BYTES)
#: Options that apply to all roots.
COMMON_OPTIONS = (
    Option(
        ALLOWED_ROOTS,
        "further roots that may be read, and where registered tables may be written",
        pattern=ANY_TEXT,
        form="URIs, separated by white space",
    ),
    WHOLE_FILE_LIMIT,
    *CACHE_OPTIONS,
)


class StorageOptions(Mapping[str, str]):
    """An immutable mapping of option names to strings. Its ``repr`` hides credentials.

    ``SCHEME.NAME`` is an option for all roots of a scheme, and ``NAME`` an option for roots of the lakehouse's scheme.
    A catalog and the files of its tables can therefore be on different storages. Pickles contain the credentials,
    because Spark tasks need them. Mappings are compared and hashed by content.

    Args:
        values: Values by name.

    Raises:
        InvalidInputError: A name or a value is not a string, or a name is invalid.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, str] | None = None):
        self._values: dict[str, str] = dict(values or {})
        items: Iterable[tuple[object, object]] = self._values.items()
        for name, value in items:
            if not (isinstance(name, str) and isinstance(value, str)):
                raise InvalidInputError(f"storage option {name!r} must be a string, not a {type(value).__name__}")
            if not _NAME.fullmatch(name):
                raise InvalidInputError(
                    "invalid name of a storage option; it is hidden because it may be a credential; use names such as"
                    " 'endpoint'"
                )

    @classmethod
    def parse(cls, text: str) -> StorageOptions:
        """Parse options of the form ``NAME=VALUE,NAME=VALUE``, or an empty text.

        Raise InvalidInputError if the text is invalid. The message contains no values.
        """
        options: dict[str, str] = {}
        for part in filter(None, map(str.strip, text.split(","))):
            name, equals, value = part.partition("=")
            if not equals:
                raise InvalidInputError("invalid storage options: use the form NAME=VALUE, separated by commas")
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
        """Return the options of one scheme by their plain names.

        Args:
            scheme: Name of the scheme.
            is_own: Whether options without a scheme apply. Options with the scheme take precedence.
        """
        prefix = f"{scheme}."
        plain = {name: value for name, value in self._values.items() if is_own and "." not in name}
        named = {name.removeprefix(prefix): value for name, value in self._values.items() if name.startswith(prefix)}
        return StorageOptions({**plain, **named})

    def beyond(self, own_root: str, other_root: str) -> StorageOptions | None:
        """Return the options for a root other than the lakehouse root, or None if there are none.

        Options with a scheme are included, because the other root may refer to additional roots.

        Args:
            own_root: Root of the lakehouse.
            other_root: The other root.
        """
        scheme, own_scheme = (root.partition("://")[0] for root in (other_root, own_root))
        if scheme == own_scheme:
            return self
        further = {name: value for name, value in self._values.items() if "." in name}
        return StorageOptions(further) if further else None

    def on_top_of(self, others: Mapping[str, str]) -> StorageOptions:
        """Return these options with ``others`` as defaults."""
        return StorageOptions({**others, **self._values})

    def shown(self) -> dict[str, str]:
        """Return the options with credentials replaced by asterisks."""
        return {name: _HIDDEN if is_secret(name) else value for name, value in self._values.items()}

    def redact(self, text: str) -> str:
        """Remove the credentials of these options and of environment variables from a text.

        Messages from servers and client libraries may contain them.
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
    """Replace likely credentials by asterisks: values of secret names in ``NAME=VALUE``, and user info in URIs."""
    return _USER_INFO.sub(_without_user, _SECRET_ASSIGNMENT.sub(rf"\1{_HIDDEN}", text))


def _without_user(match: re.Match[str]) -> str:
    return match[0] if _CONTAINER_AT_ACCOUNT.fullmatch(match[0]) else f"{match[1]}{_HIDDEN}@"
