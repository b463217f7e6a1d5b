"""Options of operations, limits without approval, and names of tables and roots."""

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
from trinitylake_ops.versions.commit_info import LONGEST_USER_CHARS

#: A lakehouse allows less, or refuses with a message.
LONGEST_NAME_BYTES = 4096

#: How the name of each clone of a branch begins. No other clone should be called so.
BRANCH_PREFIX = "branch-"


def split_name(name: str) -> tuple[str, str]:
    """Return namespace and table of ``namespace.table``. Raises InvalidInputError."""
    namespace, dot, table = name.partition(".")
    if not (namespace and dot and table) or "." in table:
        raise InvalidInputError(f"{name!r} names no table; write NAMESPACE.TABLE")
    validate_name(namespace, LONGEST_NAME_BYTES, "namespace")
    validate_name(table, LONGEST_NAME_BYTES, "table")
    return namespace, table


def _check_table(name: str) -> None:
    """Check a name of a table, of which any dot may divide namespace and table. Raises InvalidInputError."""
    namespace, dot, table = name.partition(".")
    if not (namespace and dot and table):
        raise InvalidInputError(f"{name!r} names no table; write NAMESPACE.TABLE")
    validate_name(namespace, LONGEST_NAME_BYTES, "namespace")
    validate_name(table, LONGEST_NAME_BYTES, "table")


def is_root_uri(given: str) -> bool:
    """Whether this can be the root of a lakehouse: one with credentials cannot."""
    try:
        root = normalize_root_uri(given)
        check_root(root)
    except InvalidLocationError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class CommandLine:
    """How a command takes an option: a marker among the annotations of a field or of its type.

    The flag of an option is its name. ``flag`` names one value of an option that is a list, and is repeated.
    """

    metavar: str | None = None
    flag: str | None = None
    is_argument: bool = False


#: Marks an option that is an argument of the command.
ARGUMENT = CommandLine(is_argument=True)
#: Marks an option that a command does not have, because it is about what the runs of jobs record.
JOBS_ONLY = "jobs_only"

MOST_SECONDS = 1_000_000
_DIGEST = re.compile(r"\d{1,10}(-\d{1,15})?-[0-9a-f]{64}", re.ASCII)
_LONGEST_VERSIONS_CHARS = 1_000_000


def _as_text(given: Any) -> Any:
    return str(given) if type(given) is int else given


#: The entry of a validation's context that says that whoever runs the operation knows the user.
USER_IS_KNOWN = "user_is_known"

# Texts that may be numbers of versions, as YAML takes ``versions: 21`` for a number.
_NUMBER_TOO = BeforeValidator(_as_text)


class Options(BaseModel):
    """Base of the options of an operation, or of a part of them.

    An option without a default is required. Null is the default of any other option. Raises InvalidInputError, of one
    line, for the first option that is wrong, alone or with others.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_in_one_line(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(given, Mapping):  # with the defaults in place, because they are checked as well
            known = cls.model_fields
            given = {name: value for name, value in given.items() if not (value is None and name in known)}
        try:
            return handler(given)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            is_missing = first["type"] == "missing"
            problem = f"{where} is missing" if is_missing else f"{where}: {first['msg']}, it is {first['input']!r}"
        except TrinityLakeError as error:
            problem = str(error)
        raise InvalidInputError(problem)


def _checked(check: Callable[[str], object]) -> AfterValidator:
    """Return a validator of text, which raises the errors of ``check``."""

    def checked(text: str) -> str:
        check(text)
        return text

    return AfterValidator(checked)


def _checked_list(check: Callable[[list[str]], object]) -> AfterValidator:
    """Return a validator of a list of texts, which raises the errors of ``check``."""

    def checked(texts: list[str]) -> list[str]:
        check(texts)
        return texts

    return AfterValidator(checked)


def _each(check: Callable[[str], object]) -> AfterValidator:
    """Return a validator that checks each text of a list."""

    def check_all(texts: list[str]) -> None:
        for text in texts:
            check(text)

    return _checked_list(check_all)


def _parsed_by(parse: Callable[[str], object]) -> AfterValidator:
    """Return a validator of text, which raises the errors of ``parse`` with the name of the option."""

    def checked(text: str, info: ValidationInfo) -> str:
        try:
            parse(text)
        except InvalidInputError as error:
            raise InvalidInputError(f"{info.field_name}: {error}") from None
        return text

    return AfterValidator(checked)


class OneOf(Options):
    """Base of options of which exactly one is set: the others are None."""

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if [value is not None for _, value in self].count(True) != 1:
            raise InvalidInputError(f"exactly one of {', '.join(type(self).model_fields)} must be set")
        return self


def _required(option: str, longest_chars: int = LONGEST_NAME_BYTES) -> AfterValidator:
    def check(text: str) -> None:
        if not text.strip():
            raise InvalidInputError(f"{option} must not be empty")
        if len(text) > longest_chars:
            raise InvalidInputError(f"{option} has {len(text)} characters, more than {longest_chars}")

    return _checked(check)


def _check_namespace(text: str) -> None:
    validate_name(text, LONGEST_NAME_BYTES, "namespace")


def _root(option: str, example: str) -> AfterValidator:
    def check(text: str) -> None:
        if not text:
            raise InvalidInputError(f"{option} must not be empty")
        if not is_root_uri(text):
            raise InvalidInputError(
                f"{option} is not shown, as it may hold credentials; give an absolute path or a URI such as {example}"
            )

    return _checked(check)


def _check_approver(text: str, info: ValidationInfo) -> str:
    if not text.strip() and not (info.context or {}).get(USER_IS_KNOWN):
        raise InvalidInputError("approved_by is missing: write who approves the plan")
    return text


def check_person(text: str) -> None:
    """Raise InvalidInputError for a text that cannot be recorded as the name of a person."""
    if len(text) > LONGEST_USER_CHARS or not text.isprintable():
        shown = repr(text[:LONGEST_USER_CHARS]) + ("..." if len(text) > LONGEST_USER_CHARS else "")
        raise InvalidInputError(
            f"approved_by: {shown} is no name of a person: take up to {LONGEST_USER_CHARS} characters, none of them"
            " invisible"
        )


def _positive_duration(text: str) -> timedelta:
    duration = duration_of(text)
    if not duration:
        raise InvalidInputError(f"{text!r} must be longer than 0; leave it out for no end")
    return duration


def _check_digest(text: str) -> None:
    if not _DIGEST.fullmatch(text):
        raise InvalidInputError(f"digest: {text!r} is no digest of a plan; the run that plans shows it")


#: Each of the tables and namespaces of a command has a flag.
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
#: The number of a version.
VersionNumber = Annotated[int, CommandLine(metavar="N"), Field(ge=0)]
#: Versions such as ``3-90,95``.
VersionsText = Annotated[
    str,
    CommandLine(metavar="VERSIONS"),
    _NUMBER_TOO,
    _required("versions", _LONGEST_VERSIONS_CHARS),
    _checked(VersionRanges.parse),
]
#: The name of a new export.
NewExportText = Annotated[str, CommandLine(metavar="NAME"), _required("name"), _checked(check_name)]
#: The name of an existing export: other programs may give it any.
ExportText = Annotated[str, CommandLine(metavar="NAME"), _required("name")]
#: A time as ISO 8601.
TimeText = Annotated[str, CommandLine(metavar="TIME"), _parsed_by(time_of)]
#: A duration such as 30d, 12h, 90m or 45s.
DurationText = Annotated[str, CommandLine(metavar="DURATION"), _parsed_by(duration_of)]
#: A duration of more than 0.
PositiveDurationText = Annotated[str, CommandLine(metavar="DURATION"), _parsed_by(_positive_duration)]
#: Another root.
TargetText = Annotated[str, CommandLine(metavar="URI"), _root("target", "s3://BUCKET/PREFIX")]
#: A table root.
TableRootText = Annotated[str, CommandLine(metavar="URI"), _root("table_root", "s3://BUCKET/PREFIX")]
#: The manifest of an inventory.
InventoryText = Annotated[str, CommandLine(metavar="URI"), _root("inventory", "s3://BUCKET/PREFIX/manifest.json")]
#: The mark of an option that may be left out only where the runner of the operation knows the user.
APPROVER = AfterValidator(_check_approver)
#: Who approved something.
PersonText = Annotated[str, APPROVER, _checked(check_person)]
#: The digest of a plan.
DigestText = Annotated[str, _required("digest"), _checked(_check_digest)]
#: A table as ``namespace.table``.
TableText = Annotated[str, CommandLine(metavar="NAMESPACE.TABLE"), _required("table"), _checked(split_name)]
#: Tables, each as ``namespace.table``.
TableTexts = Annotated[list[str], EACH_TABLE, _each(_check_table)]
#: Names of namespaces.
NamespaceTexts = Annotated[list[str], EACH_NAMESPACE, _each(_check_namespace)]


class VersionSource(OneOf):
    """A version, by its number or by the export that holds it."""

    version: VersionNumber | None = Field(default=None, description="A version, by its number.")
    export: ExportText | None = Field(default=None, description="The version of an export, by the export's name.")

    def __str__(self) -> str:
        return str(self.version) if self.export is None else self.export


def age_field(what: str) -> Any:
    """Return a field of a duration: the least age, beyond what protects transactions."""
    return Field(
        default=None,
        description=f"{what} at least this long ago, such as 7d. Never less than the lakehouse's txn_ttl_millis and 5"
        " minutes, which is the default.",
    )


def limit_field(what: str) -> Any:
    """Return a field of a limit, None for none."""
    return Field(default=None, gt=0, le=MOST_SECONDS, allow_inf_nan=False, description=f"{what}. Default: no limit.")


#: The approver that commits of unattended runs name.
LIMITS_APPROVE = "the limits of schedules"

_MILLISECOND = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyLimits:
    """The limits within which an unattended run may free something without approval.

    A plan with more files or bytes fails its run, and nothing is done. Only things older than ``min_age`` are in a
    plan. That is the time since versions were superseded or, for a purge, expired, and since orphans were written. If
    the lakehouse's own settings ask for more, those count. Raises InvalidInputError for negative limits.
    """

    max_files: int
    max_bytes: int
    min_age: timedelta

    def __post_init__(self) -> None:
        for name in ("max_files", "max_bytes"):
            number = getattr(self, name)
            if type(number) is not int or number < 0:
                raise InvalidInputError(f"{name} is {number!r}, it must be a number, at least 0")
        if self.min_age < timedelta(0):
            raise InvalidInputError(f"min_age is {self.min_age}, it must be at least 0")

    def __str__(self) -> str:
        return f"at most {self.max_files} files and {self.max_bytes} bytes, not younger than {self.min_age}"

    def allow(self, files: int, size_bytes: int) -> bool:
        """Whether a plan of so many files and bytes is within the limits."""
        return files <= self.max_files and size_bytes <= self.max_bytes

    def policy(self, lake: Lakehouse) -> RetentionPolicy:
        """Return the lakehouse's settings, changed so that nothing too young is freed."""
        own = RetentionPolicy.of(lake.snapshot().definition)
        return replace(own, protected_ms=max(own.protected_ms, self.min_age // _MILLISECOND))
