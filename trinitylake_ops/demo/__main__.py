"""``python -m trinitylake_ops.demo``."""

from trinitylake_ops.demo.play import main

if __name__ == "__main__":
    main()
