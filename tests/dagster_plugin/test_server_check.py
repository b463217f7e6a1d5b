"""The check of a server for engines: ready, not ready, silent, gone, and addresses that are none."""

from __future__ import annotations

import socket
from typing import Any

import dagster as dg
import pytest

from tests.lakes import Lakes, lakes
from tests.server.served import serving, settings_for
from trinitylake_ops.dagster_plugin import LakehouseNames, build_server_check
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.server.scheduling import Readiness

__all__ = ["lakes"]


def checked(check: dg.AssetChecksDefinition) -> Any:
    asset = dg.AssetSpec("lakehouse")
    result = dg.Definitions(assets=[asset], asset_checks=[check], executor=dg.in_process_executor)
    job = result.resolve_implicit_global_asset_job_def()
    (evaluation,) = job.execute_in_process(raise_on_error=True).get_asset_check_evaluations()
    return evaluation


def test_a_server_that_is_ready_and_one_that_is_not(lakes: Lakes, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(settings_for(lakes.local())) as served:
        ready = checked(build_server_check(served.url))
        assert ready.passed
        assert ready.metadata["answer"].value == "status 200"
        assert ready.metadata["server"].value == served.url
        monkeypatch.setattr(Readiness, "_all_respond", _no)
        assert served.application is not None
        served.application._readiness._probed_s = -10.0
        failing = checked(build_server_check(served.url, name="again"))
        assert not failing.passed
        assert failing.metadata["answer"].value == "status 503"
    assert checked(build_server_check(served.url)).metadata["answer"].value == "no response: ConnectionRefusedError"


async def _no(_readiness: object) -> bool:
    return False


def test_a_server_that_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        check = build_server_check(f"http://127.0.0.1:{silent.getsockname()[1]}", seconds=0.1)
        assert checked(check).metadata["answer"].value == "no response: TimeoutError"


def test_addresses_that_are_none() -> None:
    for url in ("", "lake", "ftp://lake", "http://", "http://user@lake", "http://lake/path", "http://lake?a=b"):
        with pytest.raises(InvalidInputError):
            build_server_check(url)
    with pytest.raises(InvalidInputError):
        build_server_check("http://lake", seconds=0)
    named = build_server_check("https://lake:8181/", LakehouseNames("sales"))
    assert [key.asset_key for key in named.check_keys] == [LakehouseNames("sales").lakehouse_key]
