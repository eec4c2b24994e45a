"""Files that must survive a crash."""

import os
from typing import IO


def sync_file(file: IO[bytes]) -> None:
    """Flush a file and wait until its content is on the disk."""
    file.flush()
    os.fsync(file.fileno())
