"""The search for leaks finds credentials in every encoding."""

import base64
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.credentials.canaries import CANARIES, SECRET_ACCESS_KEY, leaks, leaks_in_files


@pytest.mark.parametrize("canary", CANARIES)
def test_search_finds_every_encoding_of_a_credential(canary: str) -> None:
    assert leaks(f"x{canary}y")
    assert leaks(f"url?secret={quote(canary, safe='')}&x=1")
    assert leaks(canary.encode().hex())
    assert leaks(canary.upper())
    for shift in range(7):
        assert leaks(base64.b64encode(b"p" * shift + canary.encode() + b"suffix"))
        assert leaks(base64.urlsafe_b64encode(b"p" * shift + canary.encode()))


@pytest.mark.parametrize("canary", CANARIES)
def test_search_ignores_half_of_a_credential(canary: str) -> None:
    assert leaks(canary[: len(canary) // 2]) == []


def test_search_finds_signatures() -> None:
    assert leaks("Authorization: AWS4-HMAC-SHA256 Credential=x, Signature=abc")
    assert leaks("unknown access key") == []


def test_files_are_searched_by_name_and_content(tmp_path: Path) -> None:
    (tmp_path / "nested").mkdir()
    (tmp_path / "nested" / "a.bin").write_bytes(b"\0\1" + SECRET_ACCESS_KEY.encode())
    (tmp_path / "LEAKCANARYKEY0000001").write_text("")
    assert len(leaks_in_files(tmp_path)) == 2
