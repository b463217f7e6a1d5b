"""Read and commit the maintenance policy of a lakehouse.

The rules for versions are settings of the lakehouse. All other sections are one field of its definition, as canonical
JSON (FORMAT.md, "Maintenance policy").
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from trinitylake_ops.errors import InvalidInputError, UnreadablePolicyError
from trinitylake_ops.format.definitions import LakehouseDef, RetentionRules
from trinitylake_ops.format.limits import validate_changed_settings
from trinitylake_ops.operations.base import operation_span
from trinitylake_ops.operations.definition_commits import DefinitionChange
from trinitylake_ops.operations.policy.document import (
    DEFAULT_POLICY,
    MAX_POLICY_BYTES,
    MaintenancePolicy,
    VersionRules,
    json_document,
)
from trinitylake_ops.operations.retention import RetentionPolicy
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.snapshot import Snapshot

_OPERATION = "set-policy"
_PERIODS = ("keep_last", "keep_hourly", "keep_daily", "keep_weekly", "keep_monthly")
_VERSIONS = "versions"
#: How to replace an unreadable policy.
_REMEDY = "update trinitylake-ops, or replace the policy with: trinitylake policy set"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPolicy:
    """The policy of a version of a lakehouse."""

    #: The version that it was read from.
    version: int
    #: Whether the lakehouse has no policy, so that the default applies.
    is_default: bool
    #: The policy, with the lakehouse's settings as the rules for versions.
    policy: MaintenancePolicy


def policy_of(definition: LakehouseDef) -> MaintenancePolicy:
    """Return the policy that a lakehouse definition contains, or the default policy.

    The rules for versions are the settings of the definition.

    Raises:
        UnreadablePolicyError: The policy is damaged, or was written by a newer release.
    """
    stored = _decoded(definition.maintenance_policy) if definition.maintenance_policy else DEFAULT_POLICY
    retention = stored.retention.model_copy(update={_VERSIONS: _version_rules(definition)})
    return stored.model_copy(update={"retention": retention})


def read_policy(lake: Lakehouse, version: int | str | None = None) -> StoredPolicy:
    """Read the policy of a version.

    Args:
        lake: The lakehouse.
        version: The number of the version, or the name of an export; by default the latest version.

    Raises:
        UnreadablePolicyError: The policy is damaged, or was written by a newer release.
        NotFoundError: There is no such version.
        StorageError: The storage failed.
    """
    snapshot = lake.snapshot(version)
    definition = snapshot.definition
    return StoredPolicy(
        version=snapshot.version, is_default=not definition.maintenance_policy, policy=policy_of(definition)
    )


def set_policy(lake: Lakehouse, policy: MaintenancePolicy) -> int | None:
    """Commit a policy.

    Args:
        lake: The lakehouse.
        policy: The policy. Rules for versions that it leaves out stay as they are.

    Returns:
        The version that the policy was committed in; None if the latest version has this policy already.

    Raises:
        InvalidInputError: With this policy, all versions except the latest would expire.
        InvalidDefinitionError: The policy cannot be stored.
        CommitAttemptsExhaustedError: Too many concurrent commits.
        StorageError: The storage failed.
    """
    is_changed = False

    def changed(base: Snapshot) -> LakehouseDef | None:
        nonlocal is_changed
        definition = validate_changed_settings(base.definition, with_policy(base.definition, policy))
        is_changed = definition != base.definition
        return definition if is_changed else None

    with operation_span(_OPERATION):
        version = DefinitionChange(_OPERATION, "maintenance policy", changed).commit(lake, lake.snapshot())
    return version if is_changed else None


def with_policy(definition: LakehouseDef, policy: MaintenancePolicy) -> LakehouseDef:
    """Return a lakehouse definition with a policy.

    Args:
        definition: The definition.
        policy: The policy. Rules for versions that it leaves out stay as they are.

    Raises:
        InvalidInputError: With this policy, all versions except the latest would expire.
    """
    rules = policy.retention.versions
    known = definition.retention_rules or RetentionRules()
    periods = {name: getattr(rules, name) for name in _PERIODS if getattr(rules, name) is not None}
    changed = replace(known, **periods)
    definition = replace(
        definition,
        maintenance_policy=_stored_text(policy),
        maximum_version_age_millis=_first(rules.max_age_ms, definition.maximum_version_age_millis),
        minimum_versions_to_keep=_first(rules.min_versions, definition.minimum_versions_to_keep),
        retention_rules=definition.retention_rules if changed == known else changed,
    )
    if RetentionPolicy.of(definition).is_empty:
        raise InvalidInputError("retention.versions keeps no version but the latest; set max_age or min_versions")
    return definition


def _first(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


def _version_rules(definition: LakehouseDef) -> VersionRules:
    rules = definition.retention_rules or RetentionRules()
    # The settings may be outside of the bounds of new policies, because other programs can write them.
    return VersionRules.model_construct(
        max_age_ms=definition.maximum_version_age_millis,
        min_versions=definition.minimum_versions_to_keep,
        **{name: getattr(rules, name) for name in _PERIODS},
    )


def _stored_text(policy: MaintenancePolicy) -> str:
    """Return the policy without the rules for versions, which have their own fields."""
    without = policy.model_copy(update={"retention": policy.retention.model_copy(update={_VERSIONS: VersionRules()})})
    document = without.to_document()
    del document["retention"][_VERSIONS]
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def _decoded(text: str) -> MaintenancePolicy:
    """Decode the stored part of a policy. Raises UnreadablePolicyError."""
    if len(text) > MAX_POLICY_BYTES:
        raise UnreadablePolicyError(f"the maintenance policy is longer than {MAX_POLICY_BYTES} characters; {_REMEDY}")
    try:
        policy = MaintenancePolicy.of_document(json_document(text))
    except InvalidInputError as error:
        raise UnreadablePolicyError(f"the maintenance policy cannot be read: {error.message}; {_REMEDY}") from None
    if policy.retention.versions != VersionRules():
        raise UnreadablePolicyError(
            f"the maintenance policy contains rules for versions, which are separate settings; {_REMEDY}"
        )
    return policy
