"""The deployment of ``deploy/``, running: that it is whole, and what its daemon does."""

from __future__ import annotations

import pytest

from tests.e2e.topology import Topology
from trinitylake_ops.dagster_plugin.plans import DELETES_POOL

pytestmark = [pytest.mark.usefixtures("radosgw"), pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", ["code", "webserver", "viewer", "daemon"])
def test_the_health_check_of_a_service_says_yes(topology: Topology, name: str) -> None:
    topology.wait_until(topology.services[name].is_healthy, name)


def test_the_pool_of_deletions_has_its_limit(topology: Topology) -> None:
    data = topology.graphql("{ instance { concurrencyLimits { concurrencyKey limit } } }")
    assert data["instance"]["concurrencyLimits"] == [{"concurrencyKey": DELETES_POOL, "limit": 1}]


def test_the_viewer_shows_and_refuses_to_change(topology: Topology) -> None:
    assert topology.graphql("{ runsOrError { __typename } }", viewer=True)["runsOrError"]["__typename"] == "Runs"
    before = len(topology.runs())
    with pytest.raises(AssertionError, match="UnauthorizedError"):
        topology.launch("verify", viewer=True)
    reloaded = topology.graphql("mutation { reloadWorkspace { __typename } }", viewer=True)
    assert reloaded["reloadWorkspace"]["__typename"] == "UnauthorizedError"
    assert len(topology.runs()) == before
