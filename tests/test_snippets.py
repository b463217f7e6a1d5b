"""Every snippet of README.md and of the pages about Dagster is run, or compared with what it shows."""

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

from tests.dagster_plugin.plain import plain
from tests.dagster_plugin.quiet import QUIET
from tests.dagster_plugin.test_examples import OF_PIPES
from trinitylake_ops import Lakehouse, dagster_plugin, iceberg
from trinitylake_ops.dagster_plugin import TrinityLakeMaintenanceComponent
from trinitylake_ops.iceberg import catalog_at, stage_arrow
from trinitylake_ops.iceberg.write.publication import publication_id

PROJECT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/dagster", "docs/comparison.md")
COMPONENT = "trinitylake_ops.dagster_plugin.component.TrinityLakeMaintenanceComponent"


@dataclass(frozen=True)
class Snippet:
    """What stands in a fence of a page, and its language."""

    page: str
    language: str
    text: str

    def has(self, part: str) -> bool:
        return part in self.text


def snippets(page: str) -> list[Snippet]:
    """Return the snippets of a page, or of all pages of a folder."""
    path = PROJECT / page
    text = "".join(one.read_text() for one in (sorted(path.glob("*.md")) if path.is_dir() else [path]))
    fences = re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [Snippet(page, language, content) for language, content in fences]


ALL = {page: snippets(page) for page in PAGES}
DAGSTER = ALL["docs/dagster"]


def python(part: str, page: str = "docs/dagster") -> Snippet:
    (snippet,) = (one for one in ALL[page] if one.language == "python" and one.has(part))
    return snippet


def names() -> dict[str, Any]:
    """Return what a reader of the Dagster page has imported."""
    public = {name: getattr(face, name) for face in (dagster_plugin, iceberg) for name in face.__all__}
    given = {"dg": dg, "pa": pa, "time": time, "timedelta": timedelta, "Lakehouse": Lakehouse}
    return {**public, **given, "open_dagster_pipes": open_dagster_pipes}


def run(snippet: Snippet, **given: Any) -> dict[str, Any]:
    scope = {**names(), **given}
    exec(compile(snippet.text, snippet.page, "exec", dont_inherit=True), scope)
    return scope


@pytest.fixture
def lake(tmp_path: Path) -> Lakehouse:
    return Lakehouse.create(str(tmp_path / "lake"), {"fsync": "false"})


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.instance_for_test() as made:
        yield made


def resources(lake: Lakehouse) -> dict[str, Any]:
    lakehouse = dagster_plugin.TrinityLakeResource(root=lake.root)
    manager = dagster_plugin.TrinityLakeIOManager(lakehouse=lakehouse)
    lakehouses = {"lakehouse": lakehouse, "lake_lakehouse": lakehouse}
    managers = {"io_manager": manager, "lake_lakehouse_io_manager": manager}
    return {**lakehouses, **managers, "pipes": dg.PipesSubprocessClient()}


def publish(lake: Lakehouse, instance: dg.DagsterInstance, asset: dg.AssetsDefinition) -> dict[str, Any]:
    """Let a run stage and publish a table; return the metadata of its asset."""
    published = dagster_plugin.build_publish_asset(key=["publish"], tables={"table": asset}, description="It.")
    result = dg.materialize([asset, published], instance=instance, resources=resources(lake), run_config=QUIET)
    assert result.success
    event = instance.get_latest_materialization_event(asset.key)
    assert event is not None and event.asset_materialization is not None
    return plain(event.asset_materialization.metadata)


#: The tests below find each snippet by its language and a part of it.
FOUND_BY = {
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
def test_no_snippet_is_left_out(page: str) -> None:
    for snippet in ALL[page]:
        matching = [part for language, part in FOUND_BY[page] if language == snippet.language and snippet.has(part)]
        assert len(matching) == 1, f"{page}: no test, or several, for:\n{snippet.text}"
    assert len(ALL[page]) == len(FOUND_BY[page])


def test_definitions_of_the_page_load() -> None:
    one = run(python("limits=ApplyLimits"))["defs"]
    assert "lake_expire" in {job.name for job in one.resolve_all_job_defs()}
    assert {"lake_lakehouse", "lake_lakehouse_io_manager"} == set(one.get_repository_def().get_top_level_resources())
    both = run(python('name="hr"'))["defs"]
    assert {"sales_verify", "hr_verify"} <= {job.name for job in both.resolve_all_job_defs()}
    second = run(python("sensors=[build_commit_sensor(names=NAMES)]"))["defs"]
    assert [job.name for job in second.resolve_all_job_defs()] == ["__ASSET_JOB"]
    assert {key.to_user_string() for key in second.resolve_all_asset_keys()} == {"reports/customers"}


def test_publish_asset_of_two_tables_publishes_one_version(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    @dg.asset(key=["shop", "orders"], io_manager_key="lake_lakehouse_io_manager")
    def orders() -> pa.Table:
        return pa.table({"euros": [20.0, 5.5]})

    @dg.asset(key=["shop", "revenue"], io_manager_key="lake_lakehouse_io_manager")
    def revenue(orders: pa.Table) -> pa.Table:
        return orders

    publish_both = run(python('"revenue": revenue'), orders=orders, revenue=revenue)["publish"]
    assets = [orders, revenue, publish_both]
    assert dg.materialize(assets, instance=instance, resources=resources(lake), run_config=QUIET).success
    assert lake.latest_version() == 1
    assert lake.snapshot().tables("shop") == ["orders", "revenue"]


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the page's first code location, as a user saves it, with a root of the test."""
    code = tmp_path / "definitions.py"
    code.write_text(python('NAMES = LakehouseNames("lake")').text.replace("/data/lake", str(tmp_path / "lake")))
    monkeypatch.chdir(tmp_path)
    return code


def commands_of_first(first: Path) -> list[list[str]]:
    (snippet,) = (one for one in DAGSTER if one.has("dagster dev -f definitions.py"))
    lines = snippet.text.replace("/data/", f"{first.parent}/").splitlines()
    assert lines[0] == f"export DAGSTER_HOME={first.parent}/dagster && mkdir -p {first.parent}/dagster"
    return [shlex.split(line) for line in lines[1:]]


def test_the_first_code_location_needs_nothing_else(first: Path, instance: dg.DagsterInstance) -> None:
    init, materialize, dev = commands_of_first(first)
    Lakehouse.create(init[2], {"fsync": "false"})
    assert [init[0], init[1], init[3]] == ["trinitylake", "--root", "init"]
    assert dev == ["dagster", "dev", "-f", first.name]
    scope: dict[str, Any] = {"__name__": "code"}
    exec(compile(first.read_text(), str(first), "exec", dont_inherit=True), scope)
    defs: dg.Definitions = scope["defs"]
    selected = dg.AssetSelection.from_string(materialize[materialize.index("--select") + 1])
    assert selected.resolve(defs.resolve_asset_graph()) == {scope["orders"].key, scope["publish_sales"].key}
    job = defs.resolve_job_def("load_sales")
    for day in (materialize[-1], "2026-01-02", materialize[-1]):
        assert job.execute_in_process(instance=instance, partition_key=day).success
    rows = catalog_at(Lakehouse.open(init[2])).load_table("sales.orders").scan().to_arrow()
    assert sorted(rows["day"].to_pylist()) == ["2026-01-01"] * 2 + ["2026-01-02"] * 2


def test_options_are_the_same_words_in_yaml() -> None:
    resource = eval(python("SecretVariables(").text, names())
    (snippet,) = (one for one in DAGSTER if one.language == "yaml" and one.has("secret_options_from_env"))
    component = TrinityLakeMaintenanceComponent.resolve_from_yaml(f"name: lake\n{snippet.text}")
    assert component.settings().lakehouse == resource


@OF_PIPES
def test_the_assets_of_the_page_are_published(
    lake: Lakehouse, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = run(python("partitions_def=orders.partitions_def"))
    dg.Definitions(assets=[made["orders"], made["publish"]], resources=resources(lake)).get_repository_def()
    totals = run(python("def totals"))
    shown = publish(lake, instance, totals["totals"])
    assert shown["preview"].splitlines()[2] == "| 9.5 |"
    assert shown["dagster/column_schema"].columns[0].description == "Paid, without tax."
    assert totals["observed"].key == dg.AssetKey(["lake", "sales", "prices"])
    program = tmp_path / "load_orders.py"
    imports = (
        "import sys\nimport pyarrow as pa\nfrom dagster_pipes import open_dagster_pipes\nfrom trinitylake_ops import"
        " Lakehouse\nfrom trinitylake_ops.dagster_plugin import report_staged\nfrom trinitylake_ops.iceberg import"
        " stage_arrow\n"
    )
    program.write_text(f"{imports}{python('report_staged').text}main(sys.argv[1])\n")
    snippet = python("staged_by_pipes")
    started = snippet.text.replace('"spark-submit", "load_orders.py"', f"{sys.executable!r}, {str(program)!r}")
    orders = run(Snippet(snippet.page, "python", started.replace("s3://bucket/lake", lake.root)))["orders"]
    assert publish(lake, instance, orders)["dagster/row_count"] == 2


def test_an_asset_stages_by_any_means_of_pyiceberg(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    before = pa.table({"sku": ["a", "b"], "euros": [1.0, 3.0]})
    iceberg.publish_once(lake, [stage_arrow(lake, before, "shop", "prices", mode="append")], publication_id("before"))
    publish(lake, instance, run(python("StagingCatalog", "docs/comparison.md"))["prices"])
    rows = catalog_at(lake).load_table("shop.prices").scan().to_arrow().to_pylist()
    assert [row["euros"] for row in rows] == [3.0]


def test_settings_of_pools_are_taken_and_are_those_of_the_deployment() -> None:
    (snippet,) = (one for one in DAGSTER if one.language == "yaml" and one.has("default_limit"))
    given = yaml.safe_load(snippet.text)
    with dg.instance_for_test(overrides=given) as instance:
        assert instance.global_op_concurrency_default_limit == 1
    deployed = yaml.safe_load((PROJECT / "deploy" / "dagster.yaml").read_text())
    assert deployed["concurrency"]["pools"].items() >= given["concurrency"]["pools"].items()


def test_the_scaffolded_component_is_the_one_that_is_registered() -> None:
    (snippet,) = (one for one in DAGSTER if one.has("dg scaffold"))
    assert shlex.split(snippet.text) == ["dg", "scaffold", "defs", COMPONENT, "sales"]  # run by test_component.py


def test_a_wrong_option_is_refused_in_the_words_of_the_page(lake: Lakehouse) -> None:
    (snippet,) = (one for one in DAGSTER if one.language == "")
    jobs = dg.Definitions(jobs=dagster_plugin.build_jobs(), resources=resources(lake))
    config = {"name": "x", "retain_for": "-1d"}
    with pytest.raises(dg.DagsterInvalidConfigError) as refused:
        jobs.resolve_job_def("export").execute_in_process(run_config=config)
    assert snippet.text.strip() == refused.value.message


def test_what_the_readme_installs_and_makes_is_there() -> None:
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
                    (place,) = arguments[1:]
                    extras = re.fullmatch(r"\.(?:\[(.*)\])?", place)
                    assert extras is not None
                    wanted = set((extras[1] or "").split(",")) - {""}
                    assert wanted <= set(project["project"]["optional-dependencies"])
