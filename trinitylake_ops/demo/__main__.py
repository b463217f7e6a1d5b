"""``python -m trinitylake_ops.demo``."""

import sys

from trinitylake_ops.errors import MissingExtraError
from trinitylake_ops.extras import needs

if __name__ == "__main__":
    try:
        with needs("demo"):
            from trinitylake_ops.demo.walkthrough import main
    except MissingExtraError as error:
        sys.stderr.write(f"Error: {error}\n")
        sys.exit(error.exit_code)
    main()
