"""Read the identity of the GPU of a run and its SM clock in timed steps from nvidia-smi."""

from __future__ import annotations

import csv
import hashlib
import os
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path

_INTERVAL_MS = 500
_TIME_FORMAT = "%Y/%m/%d %H:%M:%S.%f"


class ClockLog(AbstractContextManager):
    """Append time and SM clock to a file while it is open; no-op without nvidia-smi.

    Args:
        path: The file: local time and MHz as nvidia-smi writes them, one sample per line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ClockLog:
        command = _command("timestamp,clocks.sm", "csv,noheader,nounits")
        if command:
            with self._path.open("ab") as file:
                self._process = subprocess.Popen(
                    [*command, "-lms", str(_INTERVAL_MS)], stdout=file, stderr=subprocess.DEVNULL
                )
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


def query_gpu(fields: str) -> list[str]:
    """Return the answer of nvidia-smi for the first GPU that the run may use; empty without nvidia-smi."""
    command = _command(fields, "csv,noheader")
    if not command:
        return []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [cell.strip() for cell in done.stdout.split(",")] if done.returncode == 0 and done.stdout else []


def find_card() -> str:
    """Return a name that identifies the card of the run; empty without nvidia-smi."""
    return "".join(hashlib.sha256(uuid.encode()).hexdigest()[:8] for uuid in query_gpu("uuid"))


def _command(fields: str, form: str) -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or "0"
    return [program, f"--query-gpu={fields}", f"--format={form}", "-i", device]


def read_clocks(path: Path) -> list[tuple[float, float]]:
    """Return the samples of a file as seconds since 1970 and MHz, oldest first; none if there is no file.

    Lines that are no sample (a truncated last line, a clock that the driver does not report) are skipped.
    """
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = [[cell.strip() for cell in row] for row in csv.reader(file)]
    return [(_seconds(row[0]), float(row[1])) for row in rows if len(row) == 2 and row[1].isdecimal()]


def append_clocks(samples: Sequence[tuple[float, float]], *, path: Path) -> None:
    """Append samples in the format of nvidia-smi."""
    with path.open("a", encoding="utf-8") as file:
        for moment, clock in samples:
            file.write(f"{datetime.fromtimestamp(moment).astimezone().strftime(_TIME_FORMAT)}, {clock:.0f}\n")


def _seconds(text: str) -> float:
    return datetime.strptime(text, _TIME_FORMAT).astimezone().timestamp()


def median_clock_mhz(samples: Sequence[tuple[float, float]], spans: Sequence[tuple[float, float]]) -> float | None:
    """Return the median clock of the samples in any of these spans of seconds; None without samples.

    Example:
        >>> median_clock_mhz([(1.0, 345.0), (2.0, 1980.0), (3.0, 1965.0), (4.0, 1980.0)], [(1.5, 4.5)])
        1980.0
    """
    clocks = [clock for moment, clock in samples if any(begin <= moment <= end for begin, end in spans)]
    return statistics.median(clocks) if clocks else None
