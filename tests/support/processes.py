"""Which processes are there, on a system with a /proc."""

from pathlib import Path


def children_of(parent):
    """The process ids of those that a process started and that still run."""
    everybody = (int(place.name) for place in Path("/proc").glob("[0-9]*"))
    return [pid for pid in everybody if is_there(pid) and (_stat(pid) or ["", ""])[1] == str(parent)]


def is_there(pid):
    """Whether a process runs; one that has ended and was not waited for does not."""
    found = _stat(pid)
    return found is not None and found[0] not in "ZX"


def _stat(pid):
    """State and parent of a process; None where there is none. Its name, which may hold anything, stands before
    them in brackets.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return None
