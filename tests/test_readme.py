"""What README.md shows runs."""

import re
from pathlib import Path

import pytest

from tests.lakes import check_lake
from trinitylake_ops import Lakehouse

README = Path(__file__).parents[1] / "README.md"


def test_the_examples_run_one_after_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    for example in examples[:3]:
        exec(compile(example.replace("/data/lake", str(tmp_path / "lake")), str(README), "exec"), names)
    lake = Lakehouse.open(str(tmp_path / "lake"))
    assert lake.snapshot().tables("sales") == ["orders"]
    assert lake.snapshot().namespaces() == ["archive", "attic", "sales"]
    assert lake.snapshot("before-migration").version == 2
    assert "Rollback of the lakehouse from version 4 to the content of version 1" in capsys.readouterr().out
    check_lake(lake)


def test_every_linked_file_is_there() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README.read_text())
    assert links
    assert [link for link in links if not (README.parent / link).exists()] == []
