import pytest

pytest.register_assert_rewrite("trinitylake_ops.storage.contract.suite")
