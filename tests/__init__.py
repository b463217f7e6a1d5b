import pytest

pytest.register_assert_rewrite("tests.races", "trinitylake_ops.storage.contract.suite")
