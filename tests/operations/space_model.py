"""The space of a lakehouse by brute force: the files that each version and each export reaches, from complete marks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trinitylake_ops import Lakehouse
from trinitylake_ops.format.definitions import ExpirationState
from trinitylake_ops.format.file_names import TABLES_PREFIX
from trinitylake_ops.format.locations import is_uri, located, to_location
from trinitylake_ops.format.node_file import decode_node
from trinitylake_ops.operations.gc.mark import CatalogReach
from trinitylake_ops.operations.gc.survey import SurveyedRoot, is_lapsed, pinned_versions, survey_versions
from trinitylake_ops.operations.gc.table_files import TableReach
from trinitylake_ops.operations.retention import RetentionPolicy, judge
from trinitylake_ops.operations.space.report import Amount, SpaceByUse
from trinitylake_ops.operations.space.uses import SpaceUse
from trinitylake_ops.versions.snapshot import Snapshot


@dataclass(frozen=True)
class ModelSpace:
    """The expected sums."""

    use: SpaceByUse
    catalog: SpaceByUse
    #: The files by use.
    paths: dict[SpaceUse, frozenset[str]]
    #: The bytes that each version that can be read or undeleted needs.
    needed_bytes: dict[int, int]


def model_space(lake: Lakehouse) -> ModelSpace:
    """Read every version and every export completely, and sum the listed files that they reach."""
    lake = Lakehouse(lake.storage, lake.storage_options, cache="off")
    base = lake.snapshot()
    sizes_bytes = {info.path: info.size_bytes for info in lake.storage.list()}
    by_version, by_export = _reached(lake, base)
    versions_by_use = _versions_by_use(lake, base)
    paths: dict[SpaceUse, frozenset[str]] = {}
    counted: set[str] = set()
    now_ms = lake.storage.now_ms()
    lapsed = {record.name for record in base.definition.exports if is_lapsed(record, now_ms)}
    for use in SpaceUse:
        reached = {path for version in versions_by_use[use] for path in by_version[version]}
        if use in (SpaceUse.EXPORTS, SpaceUse.EXPIRABLE):
            for name, files in by_export.items():
                if (name in lapsed) == (use == SpaceUse.EXPIRABLE):
                    reached |= files
        paths[use] = frozenset((reached & sizes_bytes.keys()) - counted)
        counted |= paths[use]

    def amount(of: frozenset[str], *, only_catalog: bool) -> Amount:
        chosen = [path for path in of if not only_catalog or not path.startswith(TABLES_PREFIX)]
        return Amount(len(chosen), sum(sizes_bytes[path] for path in chosen))

    return ModelSpace(
        use=SpaceByUse.of({use: amount(files, only_catalog=False) for use, files in paths.items()}),
        catalog=SpaceByUse.of({use: amount(files, only_catalog=True) for use, files in paths.items()}),
        paths=paths,
        needed_bytes={
            version: sum(sizes_bytes.get(path, 0) for path in files) for version, files in by_version.items()
        },
    )


def _reached(lake: Lakehouse, base: Snapshot) -> tuple[dict[int, set[str]], dict[str, set[str]]]:
    survey = survey_versions(lake, base)
    versions = survey.live() + survey.expired(ExpirationState.EXPIRED)
    by_version = {
        version: _files_of(lake, survey.roots[version]) | {lake.files.roots.path(version)} for version in versions
    }
    by_export = {}
    for name, location in base.definition.exported_snapshots.items():
        path = to_location(lake.root, location)
        if not is_uri(path):
            root = SurveyedRoot.of(0, decode_node(lake.storage.read(path), path), path, located(lake.root))
            by_export[name] = _files_of(lake, root) | {path}
    return by_version, by_export


def _files_of(lake: Lakehouse, root: SurveyedRoot) -> set[str]:
    catalog = CatalogReach(lake.files)
    catalog.add([root])
    tables = TableReach(lake)
    tables.add(catalog.tables)
    return {path for paths in (*catalog.paths, tables.files) for path in paths if not is_uri(path)}


def _versions_by_use(lake: Lakehouse, base: Snapshot) -> dict[SpaceUse, set[int]]:
    survey, now_ms = survey_versions(lake, base), lake.storage.now_ms()
    policy = RetentionPolicy.of(base.definition)
    pins = pinned_versions(survey, now_ms)
    unpinned = [replace(age, pins=()) for age in survey.ages(now_ms)]
    expiring = {verdict.version for verdict in judge(unpinned, policy, now_ms) if verdict.expires}
    versions: dict[SpaceUse, set[int]] = {use: set() for use in SpaceUse}
    versions[SpaceUse.CURRENT] = {base.version}
    for version in survey.live():
        labels = pins.get(version, [])
        if version not in expiring:
            use = SpaceUse.OLDER
        elif not labels:
            use = SpaceUse.EXPIRABLE
        else:
            use = SpaceUse.CLONES if all(label.startswith("clone") for label in labels) else SpaceUse.EXPORTS
        versions[use].add(version)
    versions[SpaceUse.EXPIRED] = set(survey.expired(ExpirationState.EXPIRED))
    return versions
