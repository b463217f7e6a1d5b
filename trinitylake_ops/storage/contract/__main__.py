"""Runs the contract: ``python -m trinitylake_ops.storage.contract MODULE:FACTORY [options of pytest]``."""

from __future__ import annotations

import sys

from trinitylake_ops.extras import needs

_USAGE = """\
usage: python -m trinitylake_ops.storage.contract MODULE:FACTORY [options of pytest]

Runs on a storage what every storage must do (docs/storages/README.md, "Write a storage").
FACTORY takes a folder of its own (pathlib.Path) and returns a storage; called twice with one folder, it opens the same
files twice. Example: python -m trinitylake_ops.storage.contract my_package.tests:on_my_server -x
"""


def main(arguments: list[str]) -> int:
    """Run the contract, and return the exit code of pytest; 2 without a factory. Raises MissingExtraError."""
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
