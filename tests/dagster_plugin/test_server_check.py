"""Test the check of an Iceberg REST server that is ready, not ready, unresponsive or stopped, and invalid URLs."""

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
    definitions = dg.Definitions(assets=[asset], asset_checks=[check], executor=dg.in_process_executor)
    job = definitions.resolve_implicit_global_asset_job_def()
    (evaluation,) = job.execute_in_process(raise_on_error=True).get_asset_check_evaluations()
    return evaluation


def test_check_passes_only_when_server_is_ready(lakes: Lakes, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = lakes.local()
    with serving(settings_for(lake)) as server:
        ready = evaluate(build_server_check(server.url))
        assert ready.passed
        assert ready.metadata["answer"].value == "status 200"
        assert ready.metadata["server"].value == server.url
    with serving(settings_for(lake)) as server:
        with monkeypatch.context() as patch:
            patch.setattr(Lakehouse, "latest_version", _unreachable)
            failing = evaluate(build_server_check(server.url, name="second_check"))
        assert not failing.passed
        assert failing.metadata["answer"].value == "status 503"
    assert evaluate(build_server_check(server.url)).metadata["answer"].value == "no response: ConnectionRefusedError"


def _unreachable(_lake: Lakehouse) -> int:
    raise StorageError("the storage does not respond")


def test_check_fails_when_server_does_not_respond() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        check = build_server_check(f"http://127.0.0.1:{listener.getsockname()[1]}", seconds=0.1)
        assert evaluate(check).metadata["answer"].value == "no response: TimeoutError"


def test_invalid_urls_are_rejected() -> None:
    for url in ("", "lake", "ftp://lake", "http://", "http://user@lake", "http://lake/path", "http://lake?a=b"):
        with pytest.raises(InvalidInputError):
            build_server_check(url)
    with pytest.raises(InvalidInputError):
        build_server_check("http://lake", seconds=0)
    sales_check = build_server_check("https://lake:8181/", LakehouseNames("sales"))
    assert [key.asset_key for key in sales_check.check_keys] == [LakehouseNames("sales").lakehouse_key]
