"""``python -m lightning_fastft``: the same as the command ``fastft``."""

import sys

from lightning_fastft.cli import main

if __name__ == "__main__":
    sys.exit(main())
