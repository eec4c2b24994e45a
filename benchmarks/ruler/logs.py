"""The log of a comparison: one compressed file with every record, the driver and the clocks, from which its rows are
computed again.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.ruler.clocks import query_gpu, read_clocks
from benchmarks.ruler.pairs import comparison_rows, pool
from benchmarks.ruler.report import read_records

LOGS = Path(__file__).parents[1] / "logs"
_QUERY = "name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.mem"
# Long, and not needed to check figures.
_DROPPED = ("traceback", "statuses", "host_wait_places", "command")


class RunLog(NamedTuple):
    """Content of a log.

    Args:
        path: The file.
        about: Row, date, command, driver, gaps and number of passes.
        records: Records of all cases.
        clocks: Samples of seconds since 1970 and MHz.
    """

    path: Path
    about: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    clocks: Sequence[tuple[float, float]]

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of results.csv that the records give."""
        pooled = pool(self.records, clocks=self.clocks, num_passes=self.about["num_passes"])
        rows = comparison_rows(pooled, command=self.about["command"])
        return [{**row, "date": self.about["date"]} for row in rows]


def write_log(
    out: Path, *, name: str, command: str, gaps: Mapping[str, str], num_passes: int, folder: Path | None = None
) -> Path:
    """Write the log of a folder of results, replacing that of an earlier call, and return its path."""
    records = read_records(out / "raw.jsonl")
    # Keep only samples within timed steps.
    spans = [(record["timed_from"], record["timed_to"]) for record in records if "timed_to" in record]
    clocks = [
        (round(moment, 1), clock)
        for moment, clock in read_clocks(out / "clocks.csv")
        if any(begin <= moment <= end for begin, end in spans)
    ]
    devices = [record["versions"]["device"] for record in records if "device" in record.get("versions", {})]
    device = devices[0].removeprefix("NVIDIA ").split()[0].lower() if devices else "cpu"
    about = {
        "row": name,
        "date": date.today().isoformat(),
        "command": command,
        "driver": describe_driver(),
        "gaps": gaps,
        "num_passes": num_passes,
    }
    for old in out.glob("*.jsonl.gz"):
        old.unlink()
    path = out / f"{name}-{device}-{about['date']}.jsonl.gz"
    lines = [{"about": about}, {"clocks": clocks}]
    lines += [{key: value for key, value in record.items() if key not in _DROPPED} for record in records]
    with gzip.GzipFile(path, "wb", mtime=0) as file:
        file.write("".join(json.dumps(_rounded(line)) + "\n" for line in lines).encode())
    return path


def _rounded(value: Any) -> Any:
    """Return a value with floats rounded to seven digits, two more than in rows."""
    if isinstance(value, float):
        return float(f"{value:.7g}") if abs(value) < 1e9 else round(value, 2)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def read_log(path: Path) -> RunLog:
    """Return the content of a log."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        about, clocks, *records = (json.loads(line) for line in file)
    return RunLog(path, about["about"], records, [(moment, clock) for moment, clock in clocks["clocks"]])


def read_logs(folder: Path = LOGS) -> Iterator[RunLog]:
    """Yield every log of a folder, by name."""
    for path in sorted(folder.glob("*.jsonl.gz")):
        yield read_log(path)


def join_logs(paths: Sequence[Path], *, out: Path, card: str = "") -> int:
    """Copy the records and clocks of earlier calls into a folder of results; return the number of skipped records.

    Records of another card are skipped, because cards of one kind differ in speed. card is that of this call; empty if
    unknown, as in older records.
    """
    from benchmarks.ruler.cases import CaseLog
    from benchmarks.ruler.clocks import append_clocks

    num_others = 0
    for path in paths:
        log = read_log(path)
        own = [record for record in log.records if not card or record.get("card", card) == card]
        num_others += len(log.records) - len(own)
        for record in own:
            CaseLog(out / "raw.jsonl").write(dict(record))
        append_clocks(log.clocks, path=out / "clocks.csv")
    return num_others


def describe_driver() -> dict[str, str]:
    """Return name, driver, memory, power limit and highest clocks of the GPU; empty without nvidia-smi."""
    return dict(zip(_QUERY.split(","), query_gpu(_QUERY)))
