"""End as told: ``-m tests.support.two_ranks_worker <folder> <exit code>``, "abort" for an aborted rank, "hang"
for one that waits for ever.
"""

import os
import sys
import threading
import time
from pathlib import Path


def wait_for_ever():
    threading.Event().wait()


def main(folder, end):
    rank = os.environ["RANK"]
    (Path(folder) / f"{rank}.{os.getpid()}").touch()
    # The launcher kills the other rank as soon as one has ended.
    while len(list(Path(folder).iterdir())) < 2:
        time.sleep(0.01)
    if end == "abort":
        os.abort()
    if end == "hang":
        wait_for_ever()
    sys.exit(int(end))


if __name__ == "__main__":
    main(*sys.argv[1:])
