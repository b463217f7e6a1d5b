"""Base classes and types of options, limits of unattended runs, and checks of names and roots."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from trinitylake_ops import Lakehouse
from trinitylake_ops.declarations.texts import duration_of, parse_properties, time_of
from trinitylake_ops.errors import InvalidInputError, InvalidLocationError, TrinityLakeError
from trinitylake_ops.format.keys import validate_name
from trinitylake_ops.format.locations import normalize_root_uri
from trinitylake_ops.format.version_ranges import VersionRanges
from trinitylake_ops.operations import RetentionPolicy
from trinitylake_ops.operations.export_records import check_name
from trinitylake_ops.storage.registry import check_root
from trinitylake_ops.versions.commit_info import MAX_USER_CHARS

#: An upper bound for all names. A lakehouse has smaller limits, which it checks itself.
MAX_NAME_BYTES = 4096

#: The prefix of the names of branch clones. The names of other clones should not have this prefix.
BRANCH_PREFIX = "branch-"


def split_name(name: str) -> tuple[str, str]:
    """Split ``namespace.table``. Raises InvalidInputError."""
    namespace, dot, table = name.partition(".")
    if not (namespace and dot and table) or "." in table:
        raise InvalidInputError(f"{name!r} is not a table name; use NAMESPACE.TABLE")
    validate_name(namespace, MAX_NAME_BYTES, "namespace")
    validate_name(table, MAX_NAME_BYTES, "table")
    return namespace, table


def _check_table(name: str) -> None:
    """Check a table name in which any dot may separate namespace and table. Raises InvalidInputError."""
    namespace, dot, table = name.partition(".")
    if not (namespace and dot and table):
        raise InvalidInputError(f"{name!r} is not a table name; use NAMESPACE.TABLE")
    validate_name(namespace, MAX_NAME_BYTES, "namespace")
    validate_name(table, MAX_NAME_BYTES, "table")


def is_root_uri(uri: str) -> bool:
    """Whether a URI can be the root of a lakehouse. A URI with credentials cannot."""
    try:
        root = normalize_root_uri(uri)
        check_root(root)
    except InvalidLocationError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class CommandLine:
    """How a command accepts an option. It is a marker among the annotations of a field or of its type."""

    metavar: str | None = None
    #: The flag that adds one value to a list. By default a flag is derived from the option's name.
    flag: str | None = None
    is_argument: bool = False


#: Marks an option that is an argument of its command.
ARGUMENT = CommandLine(is_argument=True)
#: Marks an option that only jobs have, because it concerns what runs record.
JOBS_ONLY = "jobs_only"

MAX_SECONDS = 1_000_000
_DIGEST = re.compile(r"\d{1,10}(-\d{1,15})?-[0-9a-f]{64}", re.ASCII)
_MAX_VERSIONS_CHARS = 1_000_000


def _as_text(value: Any) -> Any:
    return str(value) if type(value) is int else value


#: The key in a validation context that states whether the orchestrator knows the user.
USER_IS_KNOWN = "user_is_known"

# YAML reads ``versions: 21`` as a number.
_INT_AS_TEXT = BeforeValidator(_as_text)


class Options(BaseModel):
    """Base class of the options of an operation, or of a group of these options.

    An option without a default is required. None selects the default of any other option. Raises InvalidInputError
    with a one-line message for the first invalid option.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    @model_validator(mode="wrap")
    @classmethod
    def _raise_one_line(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(values, Mapping):  # drop None, so that defaults apply and are validated
            fields = cls.model_fields
            values = {name: value for name, value in values.items() if not (value is None and name in fields)}
        try:
            return handler(values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            is_missing = first["type"] == "missing"
            problem = f"{where} is required" if is_missing else f"{where}: {first['msg']}, but it is {first['input']!r}"
        except TrinityLakeError as error:
            problem = str(error)
        raise InvalidInputError(problem)


def _checked(check: Callable[[str], object]) -> AfterValidator:
    """Return a validator for a string that calls ``check``, which may raise."""

    def checked(text: str) -> str:
        check(text)
        return text

    return AfterValidator(checked)


def _checked_list(check: Callable[[list[str]], object]) -> AfterValidator:
    """Return a validator for a list of strings that calls ``check``, which may raise."""

    def checked(texts: list[str]) -> list[str]:
        check(texts)
        return texts

    return AfterValidator(checked)


def _each(check: Callable[[str], object]) -> AfterValidator:
    """Return a validator that calls ``check`` for each string in a list."""

    def check_all(texts: list[str]) -> None:
        for text in texts:
            check(text)

    return _checked_list(check_all)


def _parsed_by(parse: Callable[[str], object]) -> AfterValidator:
    """Return a validator for a string that calls ``parse``, and prefixes its errors with the name of the option."""

    def checked(text: str, info: ValidationInfo) -> str:
        try:
            parse(text)
        except InvalidInputError as error:
            raise InvalidInputError(f"{info.field_name}: {error}") from None
        return text

    return AfterValidator(checked)


class OneOf(Options):
    """Base class of a group of options of which exactly one must be set; the others are None."""

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if [value is not None for _, value in self].count(True) != 1:
            raise InvalidInputError(f"exactly one of {', '.join(type(self).model_fields)} must be set")
        return self


def _required(option: str, max_chars: int = MAX_NAME_BYTES) -> AfterValidator:
    def check(text: str) -> None:
        if not text.strip():
            raise InvalidInputError(f"{option} must not be empty")
        if len(text) > max_chars:
            raise InvalidInputError(f"{option} has {len(text)} characters, more than {max_chars}")

    return _checked(check)


def _check_namespace(text: str) -> None:
    validate_name(text, MAX_NAME_BYTES, "namespace")


def _root(option: str, example: str) -> AfterValidator:
    def check(text: str) -> None:
        if not text:
            raise InvalidInputError(f"{option} must not be empty")
        if not is_root_uri(text):
            raise InvalidInputError(
                f"{option} is not a valid root; use an absolute path or a URI such as {example} (the value is not"
                " shown, because it may contain credentials)"
            )

    return _checked(check)


def _check_approver(text: str, info: ValidationInfo) -> str:
    if not text.strip() and not (info.context or {}).get(USER_IS_KNOWN):
        raise InvalidInputError("approved_by is required; name the person who approves the plan")
    return text


def check_person(text: str) -> None:
    """Raise InvalidInputError for a string that cannot be recorded as a person's name."""
    if len(text) > MAX_USER_CHARS or not text.isprintable():
        quoted = repr(text[:MAX_USER_CHARS]) + ("..." if len(text) > MAX_USER_CHARS else "")
        raise InvalidInputError(
            f"approved_by: {quoted} is not a valid name; use at most {MAX_USER_CHARS} printable characters"
        )


def _positive_duration(text: str) -> timedelta:
    duration = duration_of(text)
    if not duration:
        raise InvalidInputError(f"{text!r} is not longer than 0; leave it out for no limit")
    return duration


def _check_digest(text: str) -> None:
    if not _DIGEST.fullmatch(text):
        raise InvalidInputError(f"digest: {text!r} is not a digest of a plan; copy the digest that the plan shows")


#: Tables and namespaces are passed to a command by repeating a flag.
EACH_TABLE = CommandLine(metavar="NAMESPACE.TABLE", flag="--table")
EACH_NAMESPACE = CommandLine(metavar="NAMESPACE", flag="--namespace")
#: The name of a namespace.
NamespaceText = Annotated[str, _required("namespace"), _checked(_check_namespace)]
#: Properties, each as ``NAME=VALUE``.
PropertyTexts = Annotated[
    list[str],
    CommandLine(metavar="NAME=VALUE", flag="--property"),
    _checked_list(lambda texts: parse_properties(texts, "properties")),
]
#: A version number.
VersionNumber = Annotated[int, CommandLine(metavar="N"), Field(ge=0)]
#: Versions such as ``3-90,95``.
VersionsText = Annotated[
    str,
    CommandLine(metavar="VERSIONS"),
    _INT_AS_TEXT,
    _required("versions", _MAX_VERSIONS_CHARS),
    _checked(VersionRanges.parse),
]
#: The name of a new export.
NewExportText = Annotated[str, CommandLine(metavar="NAME"), _required("name"), _checked(check_name)]
#: The name of an existing export. Other programs may choose names that this package rejects for new exports.
ExportText = Annotated[str, CommandLine(metavar="NAME"), _required("name")]
#: A time in ISO 8601, or milliseconds since 1970.
TimeText = Annotated[str, CommandLine(metavar="TIME"), _parsed_by(time_of)]
#: A duration such as 30d, 12h, 90m or 45s.
DurationText = Annotated[str, CommandLine(metavar="DURATION"), _parsed_by(duration_of)]
#: A duration longer than 0.
PositiveDurationText = Annotated[str, CommandLine(metavar="DURATION"), _parsed_by(_positive_duration)]
#: The root of another lakehouse.
TargetText = Annotated[str, CommandLine(metavar="URI"), _root("target", "s3://BUCKET/PREFIX")]
#: A table root.
TableRootText = Annotated[str, CommandLine(metavar="URI"), _root("table_root", "s3://BUCKET/PREFIX")]
#: The URI of an inventory's manifest.
InventoryText = Annotated[str, CommandLine(metavar="URI"), _root("inventory", "s3://BUCKET/PREFIX/manifest.json")]
#: Marks an option that is required unless the orchestrator knows the user.
APPROVER = AfterValidator(_check_approver)
#: The name of the approver.
PersonText = Annotated[str, APPROVER, _checked(check_person)]
#: The digest of a plan.
DigestText = Annotated[str, _required("digest"), _checked(_check_digest)]
#: A table as ``namespace.table``.
TableText = Annotated[str, CommandLine(metavar="NAMESPACE.TABLE"), _required("table"), _checked(split_name)]
#: A list of tables, each as ``namespace.table``.
TableTexts = Annotated[list[str], EACH_TABLE, _each(_check_table)]
#: A list of namespaces.
NamespaceTexts = Annotated[list[str], EACH_NAMESPACE, _each(_check_namespace)]


class VersionSource(OneOf):
    """A version, selected by its number or by an export."""

    version: VersionNumber | None = Field(default=None, description="The number of a version.")
    export: ExportText | None = Field(default=None, description="The name of an export, whose version is used.")

    def __str__(self) -> str:
        return str(self.version) if self.export is None else self.export


def age_field(text: str) -> Any:
    """Return a field for a minimum age."""
    return Field(
        default=None,
        description=f"{text} at least this long ago, such as 7d. The minimum and default is the lakehouse's"
        " txn_ttl_millis plus 5 minutes.",
    )


def limit_field(text: str) -> Any:
    """Return a field for a limit. None means no limit."""
    return Field(default=None, gt=0, le=MAX_SECONDS, allow_inf_nan=False, description=f"{text}. Default: no limit.")


#: The approver that commits of unattended runs record.
LIMITS_APPROVE = "the limits of schedules"

_MILLISECOND = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyLimits:
    """Limits within which an unattended run may reclaim space without approval.

    If a plan exceeds ``max_files`` or ``max_bytes``, its run fails and nothing is done. Raises InvalidInputError for
    negative limits.
    """

    max_files: int
    max_bytes: int
    #: The minimum time since versions were superseded, or since they expired (purge), or since orphans were written.
    #: If the lakehouse's own settings require a higher age, that age applies.
    min_age: timedelta

    def __post_init__(self) -> None:
        for name in ("max_files", "max_bytes"):
            number = getattr(self, name)
            if type(number) is not int or number < 0:
                raise InvalidInputError(f"{name} is {number!r}; it must be a whole number of at least 0")
        if self.min_age < timedelta(0):
            raise InvalidInputError(f"min_age is {self.min_age}; it must be at least 0")

    def __str__(self) -> str:
        return f"at most {self.max_files} files and {self.max_bytes} bytes, at least {self.min_age} old"

    def allow(self, files: int, size_bytes: int) -> bool:
        """Whether a plan with this number of files and bytes is within the limits."""
        return files <= self.max_files and size_bytes <= self.max_bytes

    def policy(self, lake: Lakehouse) -> RetentionPolicy:
        """Return the lakehouse's retention settings, extended to protect everything younger than ``min_age``."""
        policy = RetentionPolicy.of(lake.snapshot().definition)
        return replace(policy, protected_ms=max(policy.protected_ms, self.min_age // _MILLISECOND))
