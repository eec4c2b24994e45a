"""How a rank of a test ends."""

import os
import sys


def leave():
    """End the process at once, with everything written.

    At the end of a program with a gloo group torch (2.13, CPU) now and then aborts in threads of its own ("terminate called without an active
    exception", seen in about one run of ten on a busy machine), after the results are saved.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
