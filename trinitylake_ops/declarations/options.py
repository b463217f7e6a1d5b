"""Options of operations, limits without approval, and names of tables and roots."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
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


def is_root_uri(given: str) -> bool:
    """Whether this can be the root of a lakehouse: one with credentials cannot."""
    try:
        root = normalize_root_uri(given)
        check_root(root)
    except InvalidLocationError:
        return False
    return True


MOST_DAYS = 1_000_000
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


def _each(check: Callable[[str], object]) -> AfterValidator:
    """Return a validator of several texts."""

    def checked(texts: list[str]) -> list[str]:
        for text in texts:
            check(text)
        return texts

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


def _check_time(text: str) -> None:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInputError(f"timestamp: {text!r} is no time as ISO 8601, such as 2026-01-31T12:00") from None


def _check_digest(text: str) -> None:
    if not _DIGEST.fullmatch(text):
        raise InvalidInputError(f"digest: {text!r} is no digest of a plan; the run that plans shows it")


#: The number of a version.
VersionNumber = Annotated[int, Field(ge=0)]
#: Versions such as ``3-90,95``.
VersionsText = Annotated[
    str, _NUMBER_TOO, _required("versions", _LONGEST_VERSIONS_CHARS), _checked(VersionRanges.parse)
]
#: The name of a new export.
NewExportText = Annotated[str, _required("name"), _checked(check_name)]
#: The name of an existing export: other programs may give it any.
ExportText = Annotated[str, _required("name")]
#: A time as ISO 8601.
TimeText = Annotated[str, _checked(_check_time)]
#: Another root.
TargetText = Annotated[str, _root("target", "s3://BUCKET/PREFIX")]
#: A table root.
TableRootText = Annotated[str, _root("table_root", "s3://BUCKET/PREFIX")]
#: The manifest of an inventory.
InventoryText = Annotated[str, _root("inventory", "s3://BUCKET/PREFIX/manifest.json")]
#: The mark of an option that may be left out only where the runner of the operation knows the user.
APPROVER = AfterValidator(_check_approver)
#: Who approved something.
PersonText = Annotated[str, APPROVER, _checked(check_person)]
#: The digest of a plan.
DigestText = Annotated[str, _required("digest"), _checked(_check_digest)]
#: A table as ``namespace.table``.
TableText = Annotated[str, _required("table"), _checked(split_name)]
#: Tables, each as ``namespace.table``.
TableTexts = Annotated[list[str], _each(split_name)]
#: Names of namespaces.
NamespaceTexts = Annotated[list[str], _each(_check_namespace)]


class VersionSource(OneOf):
    """A version, by its number or by the export that holds it."""

    version: VersionNumber | None = Field(default=None, description="A version, by its number.")
    export: ExportText | None = Field(default=None, description="The version of an export, by the export's name.")

    def __str__(self) -> str:
        return str(self.version) if self.export is None else self.export


def age_field(what: str) -> Any:
    """Return a field of days: the least age, beyond what protects transactions."""
    return Field(
        default=None,
        ge=0,
        le=MOST_DAYS,
        allow_inf_nan=False,
        description=f"{what} at least so many days ago. It is never less than the lakehouse's txn_ttl_millis and 5"
        " minutes, which is what null means.",
    )


def limit_field(what: str) -> Any:
    """Return a field of a limit, None for none."""
    return Field(default=None, gt=0, le=MOST_SECONDS, allow_inf_nan=False, description=f"{what}. Null: no limit.")


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
