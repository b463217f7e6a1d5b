"""Run the storage contract: ``python -m trinitylake_ops.storage.contract MODULE:FACTORY [pytest options]``."""

from __future__ import annotations

import sys

from trinitylake_ops.extras import needs

_USAGE = """\
usage: python -m trinitylake_ops.storage.contract MODULE:FACTORY [pytest options]

Run the tests that every storage must pass (docs/storages/README.md, "Write a storage").
FACTORY takes an empty folder (pathlib.Path) and returns a storage. Two calls with the same folder return storages with
the same files. Example: python -m trinitylake_ops.storage.contract my_package.tests:on_my_server -x
"""


def main(arguments: list[str]) -> int:
    """Run the contract, and return the exit code of pytest, or 2 without a factory."""
    if not arguments or arguments[0].startswith("-"):
        print(_USAGE, file=sys.stdout if arguments[:1] in (["-h"], ["--help"]) else sys.stderr)
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    with needs("contract"):
        import pytest

    package = __package__ or ""
    pytest.register_assert_rewrite(f"{package}.suite")
    plugin = ["-p", f"{package}.plugin", "--storage", arguments[0], "--pyargs", f"{package}.test_contract"]
    return int(pytest.main([*plugin, *arguments[1:]]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
