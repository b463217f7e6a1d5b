"""Properties of Iceberg tables that name code, places of files or connections, or mean nothing. None is believed.

The class that ``write.py-location-provider.impl`` names is imported by pyiceberg. Engines on Java load classes by
properties of the same kind. A person who may write a JSON file into a lakehouse must not decide which code its readers
run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from pyiceberg.table.locations import LocationProvider, ObjectStoreLocationProvider, SimpleLocationProvider
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.name_mapping import parse_mapping_from_json
from pyiceberg.table.snapshots import Snapshot

from trinitylake_ops.errors import InvalidDefinitionError
from trinitylake_ops.tables.property_names import LONGEST_NAME_CHARS, USER_PREFIX, is_allowed, not_allowed

#: Properties that would put files beyond the table's own prefix.
PATH_PROPERTIES = ("write.data.path", "write.metadata.path", "write.folder-storage.path", "write.object-storage.path")

#: Names that Iceberg reserves for the metadata itself. A client takes them as instructions: for ``format-version``, it
#: upgrades the table. Stored as properties they mean nothing.
RESERVED_PROPERTIES = frozenset(
    {
        "format-version",
        "uuid",
        "snapshot-count",
        "current-snapshot-summary",
        "current-snapshot-id",
        "current-snapshot-timestamp-ms",
        "current-schema",
        "default-partition-spec",
        "default-sort-order",
    }
)

#: The endings of names of properties whose values engines load as a class, such as ``write.py-location-provider.impl``,
#: ``encryption.kms-impl`` and ``client.factory``.
_CODE_ENDING = re.compile(r"(?:^|[.-])(?:impl|factory)\Z")
#: Parquet's Java library loads its factories of keys by these. A signer signs requests at an address of its own.
_CODE_PREFIXES = ("parquet.crypto.", "parquet.encryption.", "s3.signer")
#: The endings of names of properties whose values pyiceberg takes for whole numbers, without a check.
_NUMBER_ENDING = re.compile(r"(-bytes|-ms|-limit|num-retries|-level|-max|min-count-to-merge|snapshots-to-keep)\Z")
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)
#: A writer makes steps of these sizes: with 0 it fails, or never ends.
_POSITIVE_ENDING = re.compile(r"(-bytes|-limit|min-count-to-merge)\Z")
_LEVEL = re.compile(r"-?[0-9]{1,2}", re.ASCII)  # a level of compression
#: The endings of names of properties whose values pyiceberg takes for truth values, and the values that it takes.
_TRUTH_ENDING = re.compile(r"(?:\.enabled|\.partitioned-paths)\Z")
_TRUTHS = frozenset({"y", "yes", "t", "true", "on", "1", "n", "no", "f", "false", "off", "0"})
_FORMATS = frozenset({"avro", "orc", "parquet"})
#: The words that Iceberg's libraries know for a property. A writer that lacks one of them says so.
_WORDS = {
    "write.format.default": _FORMATS,
    "write.delete.format.default": _FORMATS,
    "write.parquet.compression-codec": frozenset(
        {"brotli", "gzip", "lz4", "lz4_raw", "lzo", "none", "snappy", "uncompressed", "zstd"}
    ),
}
_METRICS = "write.metadata.metrics."
_METRICS_MODE = re.compile(r"\s*(?:none|counts|full|truncate\([1-9][0-9]{0,8}\))\s*", re.ASCII | re.IGNORECASE)
#: Names of counts in the summaries of snapshots.
_COUNT = re.compile(
    r"(?:total|added|deleted|removed)-"
    r"(?:records|data-files|files-size|delete-files|(?:position|equality)-delete(?:s|-files))"
)
_NAME_MAPPING = "schema.name-mapping.default"
_OBJECT_STORE = "write.object-storage.enabled"


def names_code(name: str) -> bool:
    """Whether an engine may load the value of a property as code. Names that are too long are not allowed anyway."""
    if len(name) > LONGEST_NAME_CHARS:
        return False
    folded = name.strip().casefold()
    return folded.startswith(_CODE_PREFIXES) or _CODE_ENDING.search(folded) is not None


def naming_code(names: Iterable[str]) -> tuple[str, ...]:
    """Return those property names whose values may be loaded as code, in order."""
    return tuple(sorted(name for name in names if names_code(name)))


def meaningless(properties: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of Iceberg's properties with useless values: pyiceberg fails by them, without a typed error."""
    return tuple(
        name for name, value in properties.items() if len(name) <= LONGEST_NAME_CHARS and not _has_meaning(name, value)
    )


def _has_meaning(name: str, value: str) -> bool:
    if name in RESERVED_PROPERTIES:
        return False
    if name.startswith(_METRICS) and (name.endswith(".default") or ".column." in name):
        return _METRICS_MODE.fullmatch(value) is not None
    if name == _NAME_MAPPING:
        return _is_name_mapping(value)
    if name in _WORDS:
        return value.lower() in _WORDS[name]
    if name.startswith(("write.", "commit.", "history.")) and _TRUTH_ENDING.search(name):
        return value.lower() in _TRUTHS
    if name.startswith(("write.", "commit.", "history.")) and _NUMBER_ENDING.search(name):
        if name.endswith("-level"):
            return _LEVEL.fullmatch(value) is not None
        return _NUMBER.fullmatch(value) is not None and (int(value) > 0 or not _POSITIVE_ENDING.search(name))
    return True


def _is_name_mapping(text: str) -> bool:
    try:
        parse_mapping_from_json(text)
    except Exception:  # noqa: BLE001 - of what is no mapping its validators raise anything at all
        return False
    return True


def leave_out_meaningless_counts(snapshots: Iterable[Snapshot]) -> None:
    """Remove counts that are no numbers from the summaries of snapshots, just parsed. A commit would fail by them.

    Counts only inform, and no rows depend on them.
    """
    for snapshot in snapshots:
        counted = {} if snapshot.summary is None else snapshot.summary.additional_properties
        for name in [name for name, value in counted.items() if _COUNT.fullmatch(name) and not _is_count(value)]:
            del counted[name]


def _is_count(value: object) -> bool:
    return isinstance(value, str) and _NUMBER.fullmatch(value) is not None


def check_not_reserved(names: Iterable[str]) -> None:
    """Raise InvalidDefinitionError for a property of a table by which Iceberg's clients mean the metadata itself."""
    for name in names:
        if name in RESERVED_PROPERTIES:
            raise InvalidDefinitionError(
                f"property {name!r} cannot be set: Iceberg reserves it; upgrade the format version instead"
            )


def check_settable(names: Iterable[str]) -> None:
    """Raise InvalidDefinitionError for properties that clients may not set.

    These are properties that name code, those that a client could take for a setting of its connection, and those whose
    names are too long.
    """
    names = list(names)
    if long := next((name for name in names if len(name) > LONGEST_NAME_CHARS), None):
        raise InvalidDefinitionError(
            f"property {long[:100]!r} cannot be set: its name has {len(long)} characters, more than"
            f" {LONGEST_NAME_CHARS}; choose a shorter name"
        )
    if found := naming_code(names):
        raise InvalidDefinitionError(
            f"property {found[0][:100]!r} cannot be set: no property of a table may name code that others would run;"
            " leave it out"
        )
    if refused := not_allowed(names):
        raise InvalidDefinitionError(
            f"property {refused[0][:100]!r} cannot be set: a client that reads it could take it for a setting of its"
            f" connection; a property of your own can be named {f'{USER_PREFIX}{refused[0].strip()}'[:100]!r}"
        )


def usable(properties: Mapping[str, str]) -> dict[str, str]:
    """Return properties without those that clients may not set."""
    return {name: value for name, value in properties.items() if is_allowed(name) and not names_code(name)}


def location_provider(metadata: TableMetadata) -> LocationProvider:
    """Return the object that chooses the places of a table's new files: always one of pyiceberg's own two."""
    properties = usable(metadata.properties)
    is_hashed = properties.get(_OBJECT_STORE, "").lower() == "true"
    provider = ObjectStoreLocationProvider if is_hashed else SimpleLocationProvider
    return provider(metadata.location.rstrip("/"), properties)
