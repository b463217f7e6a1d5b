"""Options of operations. Who runs them shows them, and refuses wrong ones before a run exists."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime
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

from trinitylake_ops.errors import InvalidInputError, TrinityLakeError
from trinitylake_ops.format.nodes.keys import validate_name
from trinitylake_ops.format.version_ranges import VersionRanges
from trinitylake_ops.maintenance.state.export_records import check_name
from trinitylake_ops.operations.names import LONGEST_NAME_BYTES, is_root_uri, split_name
from trinitylake_ops.versions.commit_info import LONGEST_USER_CHARS

MOST_DAYS = 1_000_000
MOST_SECONDS = 1_000_000
_DIGEST = re.compile(r"\d{1,10}(-\d{1,15})?-[0-9a-f]{64}", re.ASCII)
_LONGEST_VERSIONS_CHARS = 1_000_000


def _as_text(given: Any) -> Any:
    return str(given) if type(given) is int else given


#: The entry of a validation's context that says that whoever runs the operation knows the user.
USER_IS_KNOWN = "user_is_known"

#: Texts that may be numbers of versions, as YAML takes ``to: 21`` for a number.
NUMBER_TOO = BeforeValidator(_as_text)


class Options(BaseModel):
    """Base of the options of an operation.

    Each option has a plain default, so that a form shows it. A required text is empty there, and refused. Null stands
    for the default. Raises InvalidInputError, of one line, for the first option that is wrong, alone or with others.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_in_one_line(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(given, Mapping):  # with the defaults in place, as they are checked, too
            known = cls.model_fields
            given = {
                name: known[name].default if value is None and name in known else value for name, value in given.items()
            }
        try:
            return handler(given)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            said = f"{where}: {first['msg']}, it is {first['input']!r}"
        except TrinityLakeError as error:
            said = str(error)
        raise InvalidInputError(said)


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


def _required(option: str, longest_chars: int = LONGEST_NAME_BYTES) -> AfterValidator:
    def check(text: str) -> None:
        if not text.strip():
            raise InvalidInputError(f"{option} has to be given, it is empty")
        if len(text) > longest_chars:
            raise InvalidInputError(f"{option} has {len(text)} characters, more than {longest_chars}")

    return _checked(check)


def _check_version(text: str) -> None:
    if text and not (text.isascii() and text.isdecimal()):
        raise InvalidInputError(f"version: {text!r} is no number of a version")


def _check_namespace(text: str) -> None:
    validate_name(text, LONGEST_NAME_BYTES, "namespace")


def _place_or_none(option: str, example: str) -> AfterValidator:
    def check(text: str) -> None:
        if text and not is_root_uri(text):
            raise InvalidInputError(
                f"{option} is not shown, as it may hold credentials; give an absolute path or a URI such as {example}"
            )

    return _checked(check)


def _check_approver(text: str, info: ValidationInfo) -> str:
    if not text.strip() and not (info.context or {}).get(USER_IS_KNOWN):
        raise InvalidInputError("approved_by has to be given, it is empty")
    return text


def check_person(text: str) -> None:
    """Raise InvalidInputError for a text that cannot be recorded as the name of a person."""
    if len(text) > LONGEST_USER_CHARS or not text.isprintable():
        raise InvalidInputError(
            f"approved_by: {text!r} is no name of a person: take up to {LONGEST_USER_CHARS} characters, none of them"
            " invisible"
        )


def _check_time(text: str) -> None:
    try:
        datetime.fromisoformat(text or "2000-01-01")
    except ValueError:
        raise InvalidInputError(f"timestamp: {text!r} is no time as ISO 8601, such as 2026-01-31T12:00") from None


def _check_digest(text: str) -> None:
    if not _DIGEST.fullmatch(text):
        raise InvalidInputError(f"approved_digest: {text!r} is no digest of a plan; the run that plans shows it")


#: The version to work on, by its number. It is empty for the latest.
VersionText = Annotated[str, NUMBER_TOO, _checked(_check_version)]
#: Versions such as ``3-90,95``.
VersionsText = Annotated[str, NUMBER_TOO, _required("versions", _LONGEST_VERSIONS_CHARS), _checked(VersionRanges.parse)]
#: The same, empty for none.
AnyVersionsText = Annotated[str, NUMBER_TOO]
#: The name of a new export.
NewExportText = Annotated[str, _required("name"), _checked(check_name)]
#: The name of an export that is there: other programs may give it any.
ExportText = Annotated[str, _required("name")]
#: A version by its number, or an export.
PlaceText = Annotated[str, NUMBER_TOO, _required("to")]
#: The same, empty for none.
AnyPlaceText = Annotated[str, NUMBER_TOO]
#: A time as ISO 8601, empty for none.
TimeText = Annotated[str, _checked(_check_time)]
#: Another root, empty for none.
TargetText = Annotated[str, _place_or_none("target", "s3://BUCKET/PREFIX")]
#: A table root, empty for none.
TableRootText = Annotated[str, _place_or_none("table_root", "s3://BUCKET/PREFIX")]
#: Another root, which has to be given.
RequiredTargetText = Annotated[str, _required("target"), _place_or_none("target", "s3://BUCKET/PREFIX")]
#: The manifest of an inventory, empty for none.
InventoryText = Annotated[str, _place_or_none("inventory", "s3://BUCKET/PREFIX/manifest.json")]
#: Who approved something. It may be empty where whoever runs the operation knows the user.
PersonText = Annotated[str, AfterValidator(_check_approver), _checked(check_person)]
#: The digest of a plan.
DigestText = Annotated[str, _required("approved_digest"), _checked(_check_digest)]
#: The same two of a comparison.
BeforeText = Annotated[str, NUMBER_TOO, _required("before")]
AfterText = Annotated[str, NUMBER_TOO, _required("after")]
#: A table as ``namespace.table``.
TableText = Annotated[str, _required("table"), _checked(split_name)]
#: Tables, each as ``namespace.table``.
TableTexts = Annotated[list[str], _each(split_name)]
#: Names of namespaces.
NamespaceTexts = Annotated[list[str], _each(_check_namespace)]


def age_field(what: str) -> Any:
    """Return a field of days: the least age, beyond what protects transactions."""
    return Field(
        default=0,
        ge=0,
        le=MOST_DAYS,
        allow_inf_nan=False,
        description=f"{what} at least so many days ago; never less than the lakehouse's txn_ttl_millis and 5 minutes,"
        " which is what 0 stands for.",
    )


def limit_field(what: str) -> Any:
    """Return a field of a limit, 0 for none."""
    return Field(default=0, ge=0, le=MOST_SECONDS, allow_inf_nan=False, description=f"{what}; 0: no limit.")
