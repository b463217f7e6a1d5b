"""``python -m trinitylake_ops.cli``."""

from trinitylake_ops.cli.entry import main

main()
