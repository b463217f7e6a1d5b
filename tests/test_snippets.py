"""Every snippet in README.md and in the pages about Dagster is run or compared with the code that it describes."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import time, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
import yaml
from dagster_pipes import open_dagster_pipes

from tests.dagster_plugin.metadata_values import plain
from tests.dagster_plugin.run_config import QUIET
from tests.dagster_plugin.test_examples import IGNORE_PIPES_WARNINGS
from trinitylake_ops import Lakehouse, dagster_plugin, iceberg
from trinitylake_ops.dagster_plugin import TrinityLakeMaintenanceComponent
from trinitylake_ops.iceberg import catalog_at, stage_arrow
from trinitylake_ops.iceberg.write.publication import publication_id

PROJECT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/dagster", "docs/comparison.md")
COMPONENT = "trinitylake_ops.dagster_plugin.component.TrinityLakeMaintenanceComponent"


@dataclass(frozen=True)
class Snippet:
    """A fenced code block of a page, and its language."""

    page: str
    language: str
    text: str

    def has(self, part: str) -> bool:
        return part in self.text


def snippets(page: str) -> list[Snippet]:
    """Return the snippets of a page, or of all pages in a folder."""
    path = PROJECT / page
    text = "".join(file.read_text() for file in (sorted(path.glob("*.md")) if path.is_dir() else [path]))
    fences = re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [Snippet(page, language, content) for language, content in fences]


ALL = {page: snippets(page) for page in PAGES}
DAGSTER = ALL["docs/dagster"]


def python_snippet(part: str, page: str = "docs/dagster") -> Snippet:
    """Return the Python snippet of a page that contains a text."""
    (snippet,) = (candidate for candidate in ALL[page] if candidate.language == "python" and candidate.has(part))
    return snippet


def names() -> dict[str, Any]:
    """Return the names that the snippets of the Dagster pages use without importing them."""
    public = {name: getattr(module, name) for module in (dagster_plugin, iceberg) for name in module.__all__}
    imported = {"dg": dg, "pa": pa, "time": time, "timedelta": timedelta, "Lakehouse": Lakehouse}
    return {**public, **imported, "open_dagster_pipes": open_dagster_pipes}


def run(snippet: Snippet, **variables: Any) -> dict[str, Any]:
    scope = {**names(), **variables}
    exec(compile(snippet.text, snippet.page, "exec", dont_inherit=True), scope)
    return scope


@pytest.fixture
def lake(tmp_path: Path) -> Lakehouse:
    return Lakehouse.create(str(tmp_path / "lake"), {"fsync": "false"})


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.instance_for_test() as test_instance:
        yield test_instance


def resources(lake: Lakehouse) -> dict[str, Any]:
    lakehouse = dagster_plugin.TrinityLakeResource(root=lake.root)
    manager = dagster_plugin.TrinityLakeIOManager(lakehouse=lakehouse)
    lakehouses = {"lakehouse": lakehouse, "lake_lakehouse": lakehouse}
    managers = {"io_manager": manager, "lake_lakehouse_io_manager": manager}
    return {**lakehouses, **managers, "pipes": dg.PipesSubprocessClient()}


def publish(lake: Lakehouse, instance: dg.DagsterInstance, asset: dg.AssetsDefinition) -> dict[str, Any]:
    """Stage and publish a table in one run, and return the metadata of its asset."""
    published = dagster_plugin.build_publish_asset(
        key=["publish"], tables={"table": asset}, description="Publish the table."
    )
    result = dg.materialize([asset, published], instance=instance, resources=resources(lake), run_config=QUIET)
    assert result.success
    event = instance.get_latest_materialization_event(asset.key)
    assert event is not None and event.asset_materialization is not None
    return plain(event.asset_materialization.metadata)


#: The tests below find each snippet by its language and a part of its text.
SNIPPET_KEYS = {
    "README.md": [("sh", "pip install"), ("python", "build_publish_asset"), ("", "$ trinitylake"), ("sh", "make demo")],
    "docs/dagster": [
        ("python", 'NAMES = LakehouseNames("lake")'),
        ("python", "limits=ApplyLimits"),
        ("python", "SecretVariables("),
        ("python", 'name="hr"'),
        ("python", "sensors=[build_commit_sensor(names=NAMES)]"),
        ("python", "partitions_def=orders.partitions_def"),
        ("python", '"revenue": revenue'),
        ("python", "def totals"),
        ("python", "report_staged"),
        ("python", "staged_by_pipes"),
        ("yaml", "secret_options_from_env"),
        ("yaml", "default_limit"),
        ("sh", "dagster dev -f definitions.py"),
        ("sh", "dg scaffold"),
        ("", "retain_for: "),
    ],
    "docs/comparison.md": [("python", "StagingCatalog")],
}


@pytest.mark.parametrize("page", PAGES)
def test_every_snippet_is_tested(page: str) -> None:
    for snippet in ALL[page]:
        matching = [part for language, part in SNIPPET_KEYS[page] if language == snippet.language and snippet.has(part)]
        assert len(matching) == 1, f"{page}: expected one test, not {len(matching)}, for:\n{snippet.text}"
    assert len(ALL[page]) == len(SNIPPET_KEYS[page])


def test_definitions_load() -> None:
    single = run(python_snippet("limits=ApplyLimits"))["defs"]
    assert "lake_expire" in {job.name for job in single.resolve_all_job_defs()}
    assert {"lake_lakehouse", "lake_lakehouse_io_manager"} == set(single.get_repository_def().get_top_level_resources())
    both = run(python_snippet('name="hr"'))["defs"]
    assert {"sales_verify", "hr_verify"} <= {job.name for job in both.resolve_all_job_defs()}
    second = run(python_snippet("sensors=[build_commit_sensor(names=NAMES)]"))["defs"]
    assert [job.name for job in second.resolve_all_job_defs()] == ["__ASSET_JOB"]
    assert {key.to_user_string() for key in second.resolve_all_asset_keys()} == {"reports/customers"}


def test_publish_asset_of_two_tables_publishes_one_version(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    @dg.asset(key=["shop", "orders"], io_manager_key="lake_lakehouse_io_manager")
    def orders() -> pa.Table:
        return pa.table({"euros": [20.0, 5.5]})

    @dg.asset(key=["shop", "revenue"], io_manager_key="lake_lakehouse_io_manager")
    def revenue(orders: pa.Table) -> pa.Table:
        return orders

    publish_both = run(python_snippet('"revenue": revenue'), orders=orders, revenue=revenue)["publish"]
    assets = [orders, revenue, publish_both]
    assert dg.materialize(assets, instance=instance, resources=resources(lake), run_config=QUIET).success
    assert lake.latest_version() == 1
    assert lake.snapshot().tables("shop") == ["orders", "revenue"]


@pytest.fixture
def first_location(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the first code location, with the root of the lakehouse of this test."""
    code = tmp_path / "definitions.py"
    code.write_text(python_snippet('NAMES = LakehouseNames("lake")').text.replace("/data/lake", str(tmp_path / "lake")))
    monkeypatch.chdir(tmp_path)
    return code


def commands_of_first_location(first_location: Path) -> list[list[str]]:
    (snippet,) = (snippet for snippet in DAGSTER if snippet.has("dagster dev -f definitions.py"))
    lines = snippet.text.replace("/data/", f"{first_location.parent}/").splitlines()
    assert (
        lines[0] == f"export DAGSTER_HOME={first_location.parent}/dagster && mkdir -p {first_location.parent}/dagster"
    )
    return [shlex.split(line) for line in lines[1:]]


def test_first_code_location_runs(first_location: Path, instance: dg.DagsterInstance) -> None:
    init, materialize, dev = commands_of_first_location(first_location)
    Lakehouse.create(init[2], {"fsync": "false"})
    assert [init[0], init[1], init[3]] == ["trinitylake", "--root", "init"]
    assert dev == ["dagster", "dev", "-f", first_location.name]
    scope: dict[str, Any] = {"__name__": "code"}
    exec(compile(first_location.read_text(), str(first_location), "exec", dont_inherit=True), scope)
    defs: dg.Definitions = scope["defs"]
    selected = dg.AssetSelection.from_string(materialize[materialize.index("--select") + 1])
    assert selected.resolve(defs.resolve_asset_graph()) == {scope["orders"].key, scope["publish_sales"].key}
    job = defs.resolve_job_def("load_sales")
    for day in (materialize[-1], "2026-01-02", materialize[-1]):
        assert job.execute_in_process(instance=instance, partition_key=day).success
    rows = catalog_at(Lakehouse.open(init[2])).load_table("sales.orders").scan().to_arrow()
    assert sorted(rows["day"].to_pylist()) == ["2026-01-01"] * 2 + ["2026-01-02"] * 2


def test_options_in_yaml_equal_options_in_python() -> None:
    resource = eval(python_snippet("SecretVariables(").text, names())
    (snippet,) = (
        snippet for snippet in DAGSTER if snippet.language == "yaml" and snippet.has("secret_options_from_env")
    )
    component = TrinityLakeMaintenanceComponent.resolve_from_yaml(f"name: lake\n{snippet.text}")
    assert component.settings().lakehouse == resource


@IGNORE_PIPES_WARNINGS
def test_assets_are_published(
    lake: Lakehouse, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    partitioned = run(python_snippet("partitions_def=orders.partitions_def"))
    dg.Definitions(
        assets=[partitioned["orders"], partitioned["publish"]], resources=resources(lake)
    ).get_repository_def()
    totals = run(python_snippet("def totals"))
    metadata = publish(lake, instance, totals["totals"])
    assert metadata["preview"].splitlines()[2] == "| 9.5 |"
    assert metadata["dagster/column_schema"].columns[0].description == "Paid, without tax."
    assert totals["observed"].key == dg.AssetKey(["lake", "sales", "prices"])
    program = tmp_path / "load_orders.py"
    imports = (
        "import sys\nimport pyarrow as pa\nfrom dagster_pipes import open_dagster_pipes\nfrom trinitylake_ops import"
        " Lakehouse\nfrom trinitylake_ops.dagster_plugin import report_staged\nfrom trinitylake_ops.iceberg import"
        " stage_arrow\n"
    )
    program.write_text(f"{imports}{python_snippet('report_staged').text}main(sys.argv[1])\n")
    snippet = python_snippet("staged_by_pipes")
    code = snippet.text.replace('"spark-submit", "load_orders.py"', f"{sys.executable!r}, {str(program)!r}")
    orders = run(Snippet(snippet.page, "python", code.replace("s3://bucket/lake", lake.root)))["orders"]
    assert publish(lake, instance, orders)["dagster/row_count"] == 2


def test_asset_stages_changes_made_with_pyiceberg(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    before = pa.table({"sku": ["a", "b"], "euros": [1.0, 3.0]})
    iceberg.publish_once(lake, [stage_arrow(lake, before, "shop", "prices", mode="append")], publication_id("before"))
    publish(lake, instance, run(python_snippet("StagingCatalog", "docs/comparison.md"))["prices"])
    rows = catalog_at(lake).load_table("shop.prices").scan().to_arrow().to_pylist()
    assert [row["euros"] for row in rows] == [3.0]


def test_deployment_has_documented_pool_settings() -> None:
    (snippet,) = (snippet for snippet in DAGSTER if snippet.language == "yaml" and snippet.has("default_limit"))
    documented = yaml.safe_load(snippet.text)
    with dg.instance_for_test(overrides=documented) as instance:
        assert instance.global_op_concurrency_default_limit == 1
    deployed = yaml.safe_load((PROJECT / "deploy" / "dagster.yaml").read_text())
    assert deployed["concurrency"]["pools"].items() >= documented["concurrency"]["pools"].items()


def test_scaffolded_component_is_registered() -> None:
    (snippet,) = (snippet for snippet in DAGSTER if snippet.has("dg scaffold"))
    assert shlex.split(snippet.text) == ["dg", "scaffold", "defs", COMPONENT, "sales"]  # test_component.py runs it


def test_invalid_option_is_rejected_with_documented_message(lake: Lakehouse) -> None:
    (snippet,) = (snippet for snippet in DAGSTER if snippet.language == "")
    jobs = dg.Definitions(jobs=dagster_plugin.build_jobs(), resources=resources(lake))
    config = {"name": "x", "retain_for": "-1d"}
    with pytest.raises(dg.DagsterInvalidConfigError) as caught:
        jobs.resolve_job_def("export").execute_in_process(run_config=config)
    assert snippet.text.strip() == caught.value.message


def test_readme_extras_and_make_targets_exist() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    targets = re.findall(r"^([a-z-]+):", (PROJECT / "Makefile").read_text(), flags=re.MULTILINE)
    for snippet in ALL["README.md"]:
        if snippet.language == "sh":
            for line in snippet.text.splitlines():
                program, *arguments = shlex.split(line, comments=True)
                if program == "make":
                    assert set(arguments) <= set(targets)
                else:
                    assert (program, arguments[0]) == ("pip", "install")
                    (requirement,) = arguments[1:]
                    extras = re.fullmatch(r"\.(?:\[(.*)\])?", requirement)
                    assert extras is not None
                    requested = set((extras[1] or "").split(",")) - {""}
                    assert requested <= set(project["project"]["optional-dependencies"])
