"""Test the check of an Iceberg REST server that is ready, not ready, silent or stopped, and invalid URLs."""

from __future__ import annotations

import socket
from typing import Any

import dagster as dg
import pytest

from tests.lakes import Lakes, lakes
from tests.server.live_server import serving, settings_for
from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin import LakehouseNames, build_server_check
from trinitylake_ops.errors import InvalidInputError, StorageError

__all__ = ["lakes"]


def evaluate(check: dg.AssetChecksDefinition) -> Any:
    asset = dg.AssetSpec("lakehouse")
    result = dg.Definitions(assets=[asset], asset_checks=[check], executor=dg.in_process_executor)
    job = result.resolve_implicit_global_asset_job_def()
    (evaluation,) = job.execute_in_process(raise_on_error=True).get_asset_check_evaluations()
    return evaluation


def test_check_passes_only_when_server_is_ready(lakes: Lakes, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = lakes.local()
    with serving(settings_for(lake)) as served:
        ready = evaluate(build_server_check(served.url))
        assert ready.passed
        assert ready.metadata["answer"].value == "status 200"
        assert ready.metadata["server"].value == served.url
    with serving(settings_for(lake)) as served:
        with monkeypatch.context() as patch:
            patch.setattr(Lakehouse, "latest_version", _unreachable)
            failing = evaluate(build_server_check(served.url, name="again"))
        assert not failing.passed
        assert failing.metadata["answer"].value == "status 503"
    assert evaluate(build_server_check(served.url)).metadata["answer"].value == "no response: ConnectionRefusedError"


def _unreachable(_lake: Lakehouse) -> int:
    raise StorageError("the storage does not respond")


def test_check_fails_when_server_does_not_respond() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        check = build_server_check(f"http://127.0.0.1:{silent.getsockname()[1]}", seconds=0.1)
        assert evaluate(check).metadata["answer"].value == "no response: TimeoutError"


def test_invalid_urls_are_rejected() -> None:
    for url in ("", "lake", "ftp://lake", "http://", "http://user@lake", "http://lake/path", "http://lake?a=b"):
        with pytest.raises(InvalidInputError):
            build_server_check(url)
    with pytest.raises(InvalidInputError):
        build_server_check("http://lake", seconds=0)
    check_of_sales = build_server_check("https://lake:8181/", LakehouseNames("sales"))
    assert [key.asset_key for key in check_of_sales.check_keys] == [LakehouseNames("sales").lakehouse_key]
