"""``python -m trinitylake_ops.cli``."""

from trinitylake_ops.cli.app import main

main()
