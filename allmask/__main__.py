"""`python -m allmask` is the command `allmask` (torchrun starts it this way)."""

import sys

from allmask.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
