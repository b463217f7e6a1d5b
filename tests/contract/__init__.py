"""Contracts that several implementations inherit."""

import pytest

pytest.register_assert_rewrite("tests.contract.storage_contract")
