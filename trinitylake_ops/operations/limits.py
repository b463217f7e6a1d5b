"""Limits within which an operation runs without approval."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta

from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.maintenance import RetentionPolicy

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
