"""Lakehouses in memory and in a folder, or on the server of ``--lakes``, with metered storage."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lakes import Lakes, lakes
from trinitylake_ops import Lakehouse
from trinitylake_ops.iceberg.catalog import TrinityLakeCatalog, catalog_at
from trinitylake_ops.storage import MeteredStorage

__all__ = ["lakes"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test on memory and a folder, or once on the server that ``--lakes`` names.

    Modules that set ``ON_DISK_IN_SOAK`` test file contents, which do not depend on the storage: their tests run on a
    folder only in ``make soak``.
    """
    if "lake" in metafunc.fixturenames:
        on_server = metafunc.config.getoption("lakes") != "default"
        marks = [pytest.mark.soak] if getattr(metafunc.module, "ON_DISK_IN_SOAK", False) else []
        storages = ["server"] if on_server else ["memory", pytest.param("local", marks=marks)]
        metafunc.parametrize("lake", storages, indirect=True)


@pytest.fixture
def lake(request: pytest.FixtureRequest, lakes: Lakes) -> Lakehouse:
    new_lake = lakes.memory() if request.param == "memory" else lakes.local()
    return Lakehouse.open(new_lake.root, new_lake.storage_options, storage=MeteredStorage(new_lake.storage))


@pytest.fixture
def meter(lake: Lakehouse) -> MeteredStorage:
    assert isinstance(lake.storage, MeteredStorage)
    return lake.storage


@pytest.fixture
def catalog(lake: Lakehouse) -> Iterator[TrinityLakeCatalog]:
    """A catalog on the latest version, with the namespace ``ns``."""
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    yield catalog
    catalog.close()
