"""What README.md shows runs."""

import re
from pathlib import Path

import pytest

from tests.lakes import check_lake
from trinitylake_ops import Lakehouse

README = Path(__file__).parents[1] / "README.md"


def test_the_first_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)[0]
    assert "/data/lake" in example
    exec(compile(example.replace("/data/lake", str(tmp_path / "lake")), str(README), "exec"), {})
    lake = Lakehouse.open(str(tmp_path / "lake"))
    assert lake.snapshot().tables("sales") == ["orders"]
    assert lake.snapshot("before-migration").version == 1
    assert "Rollback of the lakehouse from version 3 to the content of version 0" in capsys.readouterr().out
    check_lake(lake)


def test_every_linked_file_is_there() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README.read_text())
    assert links
    assert [link for link in links if not (README.parent / link).exists()] == []
