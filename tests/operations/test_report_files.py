"""Test that report files are written completely or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from trinitylake_ops.errors import StorageError
from trinitylake_ops.reports import write_page


def test_report_replaces_file_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("<!DOCTYPE html>before")
    path.chmod(0o640)
    (tmp_path / "link.html").symlink_to(path)
    write_page(tmp_path / "link.html", "a page\n")
    assert path.read_bytes() == b"a page\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert (tmp_path / "link.html").is_symlink()
    write_page(tmp_path / ("n" * 250 + ".html"), "a name of the maximum length")
    assert len(list(tmp_path.iterdir())) == 3


def test_failed_write_keeps_existing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    path.write_text("<!DOCTYPE html>before")

    def raise_disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, raise_disk_full)
            with pytest.raises(StorageError, match=r"page\.html"):
                write_page(path, "after")
        assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
        assert path.read_text() == "<!DOCTYPE html>before"


def test_report_is_written_only_to_regular_files(tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path / "none" / "page.html", "does not exist"),
        (tmp_path, "not a file"),
        (Path("/dev/null"), "not a file"),
        (Path("/proc/page.html"), "cannot write report"),
    ):
        with pytest.raises(StorageError, match=reason) as raised:
            write_page(path, "page")
        assert raised.value.exit_code == 5
        assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_report_does_not_replace_other_kinds_of_files(tmp_path: Path) -> None:
    for content in (b"17", b"ARROW1", b"<html>"):
        path = tmp_path / "_latest_hint.txt"
        path.write_bytes(content)
        with pytest.raises(StorageError):
            write_page(path, "<!doctype html>")
        assert path.read_bytes() == content
    path.write_bytes(b"")
    write_page(path, "<!doctype html>")
