"""The maintenance policy as a validated document."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from trinitylake_ops.errors import InvalidInputError, InvalidLocationError
from trinitylake_ops.format.locations import normalize_root_uri
from trinitylake_ops.operations.policy.values import (
    ClockTime,
    Count,
    Duration,
    LargeCount,
    PositiveDuration,
    PositiveSize,
    Size,
    StoredAge,
    clock_text,
)
from trinitylake_ops.operations.retention import RetentionPolicy
from trinitylake_ops.storage.registry import check_root

#: The largest document, in bytes of its canonical text.
MAX_POLICY_BYTES = 65_536
_MAX_RULES = 256
_MAX_WINDOWS = 32
_MAX_PATTERN_CHARS = 512
_MAX_ROOT_CHARS = 2_048
_DAY_MS = 86_400_000
_SHOWN_CHARS = 80
#: Messages for types of errors whose own messages name classes.
_MESSAGES = {
    "model_type": "must be a mapping",
    "int_type": "must be a whole number",
    "list_type": "must be a list",
    "string_type": "must be a text",
    "string_pattern_mismatch": "must not contain control characters",
}
_DAY = timedelta(days=1)


class Step(StrEnum):
    """The steps of maintenance, in the order in which they run."""

    REPAIR_HINT = "repair_hint"
    RECONCILE = "reconcile"
    FINISH_INTERRUPTED = "finish_interrupted"
    PRUNE_EXPORTS = "prune_exports"
    TRIM = "trim"
    COMPACT_TABLES = "compact_tables"
    COMPACT = "compact"
    EXPIRE = "expire"
    PURGE = "purge"
    ORPHANS = "orphans"
    DROP_OVERDUE_CLONES = "drop_overdue_clones"
    VERIFY = "verify"
    EXPORT = "export"


#: The steps whose operations have a plan, which can wait for an approval.
_APPROVABLE = frozenset(Step) - {Step.REPAIR_HINT, Step.FINISH_INTERRUPTED, Step.VERIFY, Step.EXPORT}
_STEPS = {step.value: step for step in Step}

Pattern = Annotated[str, Field(min_length=1, max_length=_MAX_PATTERN_CHARS, pattern=r"^[^\x00-\x1f\x7f]*$")]
Weekday = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
WEEKDAYS: tuple[Weekday, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


class _Part(BaseModel):
    """Base of the policy and its sections."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class VersionRules(_Part):
    """Which versions are kept. These are settings of the lakehouse; a rule that is left out stays as it is."""

    #: Keep versions that were superseded within this time.
    max_age_ms: StoredAge | None = Field(default=None, alias="max_age")
    #: Keep at least this number of the newest versions.
    min_versions: Annotated[Count, Field(ge=1)] | None = None
    keep_last: Count | None = None
    keep_hourly: Count | None = None
    keep_daily: Count | None = None
    keep_weekly: Count | None = None
    keep_monthly: Count | None = None


class TableRule(_Part):
    """Which Iceberg snapshots trim keeps in the tables that match a pattern, besides those of kept versions."""

    #: A namespace, or ``namespace.table``, with the wildcards of shells.
    pattern: Pattern
    #: Keep snapshots of the current branch that are younger than this.
    max_snapshot_age_ms: Duration = Field(default=0, alias="max_snapshot_age")
    #: Keep at least this number of the newest snapshots of each branch.
    min_snapshots: Annotated[Count, Field(ge=1)] = 1

    def matches(self, namespace: str, table: str) -> bool:
        """Whether the rule applies to a table."""
        return fnmatchcase(f"{namespace}.{table}", self.pattern) or fnmatchcase(namespace, self.pattern)


class ExportRule(_Part):
    """Which of the exports whose names match a pattern are kept. The newest one is always kept."""

    pattern: Pattern
    max_age_ms: Duration = Field(default=0, alias="max_age")
    min_exports: Count = 0
    keep_last: Count = 0
    keep_hourly: Count = 0
    keep_daily: Count = 0
    keep_weekly: Count = 0
    keep_monthly: Count = 0

    @property
    def retention(self) -> RetentionPolicy:
        """The rules in the form that prune-exports takes."""
        return RetentionPolicy(
            maximum_age_ms=self.max_age_ms,
            minimum_versions=self.min_exports,
            protected_ms=0,
            keep_last=self.keep_last,
            keep_hourly=self.keep_hourly,
            keep_daily=self.keep_daily,
            keep_weekly=self.keep_weekly,
            keep_monthly=self.keep_monthly,
        )

    @model_validator(mode="after")
    def _check_not_empty(self) -> Self:
        if self.retention.is_empty:
            raise ValueError("no rule keeps an export; set max_age, min_exports or one of the keep rules")
        return self


class Retention(_Part):
    """What is kept."""

    versions: VersionRules = VersionRules()
    #: The first rule that matches a table applies.
    tables: Annotated[list[TableRule], Field(max_length=_MAX_RULES)] = []
    #: The first rule that matches an export applies.
    exports: Annotated[list[ExportRule], Field(max_length=_MAX_RULES)] = []


class Limits(_Part):
    """What one run may do at most. ``None`` means no limit."""

    #: Nothing younger is expired, purged or removed as an orphan.
    min_age_ms: Duration = Field(default=7 * _DAY_MS, alias="min_age")
    #: Files that a run deletes without approval.
    max_deleted_files: LargeCount | None = 100_000
    #: Bytes of these files.
    max_deleted_bytes: Size | None = 1 << 40
    #: Data files that a run rewrites to compact tables.
    max_rewritten_files: LargeCount | None = 10_000
    #: Bytes of these files.
    max_rewritten_bytes: Size | None = 64 << 30
    #: Storage requests of a run.
    max_requests: Annotated[LargeCount, Field(ge=1)] | None = None
    #: The duration of a run. A started step is completed.
    max_duration_ms: PositiveDuration | None = Field(default=3_600_000, alias="max_duration")


class ExportTarget(_Part):
    """The export that a run makes if the newest one is too old."""

    every_ms: PositiveDuration = Field(alias="every")
    level: Literal["minimal", "partial", "full"] = "minimal"
    #: The root of the lakehouse to export to, which must be an allowed root; None for this lakehouse.
    target: Annotated[str, Field(min_length=1, max_length=_MAX_ROOT_CHARS)] | None = None
    #: How long the export keeps its version; None until it is dropped.
    retain_for_ms: PositiveDuration | None = Field(default=None, alias="retain_for")

    @field_validator("target")
    @classmethod
    def _check_target(cls, target: str | None) -> str | None:
        if target is not None:
            try:
                check_root(normalize_root_uri(target))
            except InvalidLocationError:
                raise ValueError(
                    "use an absolute path, or a URI without credentials such as s3://BUCKET/PREFIX"
                ) from None
        return target


class Targets(_Part):
    """The state that maintenance keeps the lakehouse in."""

    #: The size of data files; None for 128 MiB. The property ``write.target-file-size-bytes`` of a table takes
    #: precedence.
    file_size_bytes: PositiveSize | None = Field(default=None, alias="file_size")
    #: A partition with this number of small files is compacted.
    small_files: Annotated[Count, Field(ge=2)] = 5
    #: A table with this number of delete files is compacted.
    delete_files: Annotated[Count, Field(ge=1)] = 1
    #: How long ago the last verification may be; None for no verification.
    verify_every_ms: PositiveDuration | None = Field(default=7 * _DAY_MS, alias="verify_every")
    #: How long ago the last removal of orphans may be; None for no removal.
    orphans_every_ms: PositiveDuration | None = Field(default=30 * _DAY_MS, alias="orphans_every")
    #: The age at which an unfinished export or clone counts as interrupted.
    unfinished_after_ms: PositiveDuration = Field(default=_DAY_MS, alias="unfinished_after")
    export: ExportTarget | None = None


class Window(_Part):
    """A time window in UTC."""

    #: The weekdays on which the window starts.
    days: Annotated[list[Weekday], Field(min_length=1, max_length=len(WEEKDAYS))] = list(WEEKDAYS)
    start: ClockTime
    #: The first time after the window. If it is before ``start``, the window ends on the next day; if both are equal,
    #: the window lasts 24 hours.
    end: ClockTime

    @field_validator("days")
    @classmethod
    def _in_order(cls, days: list[Weekday]) -> list[Weekday]:
        return [day for day in WEEKDAYS if day in days]

    def covers(self, at: datetime) -> bool:
        """Whether a time in UTC is within the window."""
        minutes = at.hour * 60 + at.minute
        begins_today, began_yesterday = (WEEKDAYS[(at - back).weekday()] in self.days for back in (timedelta(0), _DAY))
        if self.start < self.end:
            return begins_today and self.start <= minutes < self.end
        return (begins_today and minutes >= self.start) or (began_yesterday and minutes < self.end)

    def __str__(self) -> str:
        days = "every day" if len(self.days) == len(WEEKDAYS) else ", ".join(self.days)
        return f"{days} from {clock_text(self.start)} to {clock_text(self.end)} UTC"


class MaintenancePolicy(_Part):
    """What maintenance may do by itself, when, and what it keeps."""

    retention: Retention = Retention()
    limits: Limits = Limits()
    targets: Targets = Targets()
    #: A run does something only within one of these windows; empty for any time.
    windows: Annotated[list[Window], Field(max_length=_MAX_WINDOWS)] = []
    #: A run does nothing within one of these windows.
    blackouts: Annotated[list[Window], Field(max_length=_MAX_WINDOWS)] = []
    #: Steps whose plans wait for approval, whatever their size.
    approval: Annotated[list[Step], Field(max_length=len(Step))] = []
    #: Steps that a run leaves out.
    skip: Annotated[list[Step], Field(max_length=len(Step))] = []

    @field_validator("approval", "skip", mode="before")
    @classmethod
    def _as_steps(cls, names: Any) -> Any:
        if not isinstance(names, list):
            return names
        unknown = [name for name in names if not isinstance(name, str) or name not in _STEPS]
        if unknown:
            raise ValueError(f"{str(unknown[0])[:_SHOWN_CHARS]!r} is not a step; choose from {', '.join(_STEPS)}")
        return [step for step in Step if step.value in names]

    @field_validator("approval")
    @classmethod
    def _check_approvable(cls, steps: list[Step]) -> list[Step]:
        if others := [step for step in steps if step not in _APPROVABLE]:
            raise ValueError(f"{others[0].value} has no plan to approve; leave it out, or add it to skip")
        return steps

    @classmethod
    def of_document(cls, document: object) -> Self:
        """Validate a document, such as the content of a YAML file. Raises InvalidInputError with one line."""
        if not isinstance(document, Mapping):
            raise InvalidInputError("a policy must be a mapping with the sections retention, limits, targets and so on")
        try:
            policy = cls.model_validate(dict(document))
        except ValidationError as error:
            raise InvalidInputError(f"invalid policy: {_problem(error)}") from None
        except RecursionError:
            raise InvalidInputError("invalid policy: it is nested too deeply") from None
        size_bytes = len(policy.canonical_text().encode())
        if size_bytes > MAX_POLICY_BYTES:
            raise InvalidInputError(f"the policy has {size_bytes} bytes; it must have at most {MAX_POLICY_BYTES}")
        return policy

    def to_document(self) -> dict[str, Any]:
        """Return the policy as JSON values, all fields included."""
        return self.model_dump(mode="json", by_alias=True)

    def canonical_text(self) -> str:
        """Return the policy as canonical JSON."""
        return json.dumps(self.to_document(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    def table_rule(self, namespace: str, table: str) -> TableRule | None:
        """Return the rule that applies to a table, if any."""
        return next((rule for rule in self.retention.tables if rule.matches(namespace, table)), None)

    def closed(self, at: datetime) -> str | None:
        """Return why a run does nothing at a time in UTC; None if it may run."""
        for window in self.blackouts:
            if window.covers(at):
                return f"{at:%a %H:%M} UTC is within the blackout {window}"
        if self.windows and not any(window.covers(at) for window in self.windows):
            return f"{at:%a %H:%M} UTC is outside of the windows: {'; '.join(map(str, self.windows))}"
        return None


def json_document(text: str) -> Any:
    """Decode the JSON of a policy. Raises InvalidInputError for invalid JSON and for keys that occur twice."""

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            raise InvalidInputError("invalid policy: a key occurs twice")
        return content

    try:
        return json.loads(text, object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError):
        raise InvalidInputError("invalid policy: it is not valid JSON") from None


def _problem(error: ValidationError) -> str:
    """Return the first problem of a document on one line."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"{where} is required"
    if first["type"] == "extra_forbidden":
        return f"{where[-_SHOWN_CHARS:]!r} is not a field of a policy"
    message = _MESSAGES.get(first["type"], first["msg"].removeprefix("Value error, "))
    value = first["input"]
    # A root may contain credentials.
    if first["loc"][-1:] == ("target",) or not isinstance(value, str | int | float | None):
        return f"{where}: {message}"
    shown = repr(value)
    return f"{where}: {message}, but it is {shown if len(shown) <= _SHOWN_CHARS else f'{shown[:_SHOWN_CHARS]}...'}"


#: The policy of a lakehouse that has none.
DEFAULT_POLICY = MaintenancePolicy()
