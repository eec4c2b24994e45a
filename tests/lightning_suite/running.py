"""Run a suite of tests in child processes until each test has a result, also where one hangs or kills its process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Result:
    """What became of one test: "passed", "failed" or "skipped", and the end of its traceback."""

    outcome: str
    text: str = ""


def run_tests(
    *,
    root: Path,
    out: Path,
    strategy: str,
    seconds: float,
    select: list[str] | None = None,
    only: list[str] | None = None,
) -> dict[str, Result]:
    """Return the result of each test below ``root/tests_pytorch``.

    Args:
        root: Lightning's folder ``tests``.
        out: A folder for the log of results and pytest's output.
        strategy: What ``Trainer(strategy="auto")`` becomes on one device; empty leaves it alone.
        seconds: The longest that one test may take; its process ends and the next one goes on behind it.
        select: Files or folders below ``tests_pytorch``.
        only: The node ids to run.
    """
    out.mkdir(parents=True, exist_ok=True)
    log, done = out / "results.jsonl", out / "done.txt"
    log.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.lightning_suite.plugin"]
    command += ["-p", "no:xdist", "-p", "no:randomly", "-p", "no:cacheprovider"]
    command += [
        "-c",
        str(Path(__file__).with_name("lightning.ini")),
        "--rootdir",
        str(root),
        "--basetemp",
        str(out / "tmp"),
    ]
    command += [
        "--result-log",
        str(log),
        "--default-strategy",
        strategy,
        "--test-seconds",
        str(seconds),
        "--skip",
        str(done),
    ]
    if only is not None:
        (out / "only.txt").write_text("\n".join(only))
        command += ["--only", str(out / "only.txt")]
    command += ["--continue-on-collection-errors", *(f"tests_pytorch/{path}" for path in select or [""])]
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    results: dict[str, Result] = {}
    with (out / "pytest.txt").open("wb") as output:
        while True:
            done.write_text("\n".join(results))
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
            code = subprocess.run(
                command, cwd=root, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False
            ).returncode
            num_before, (results, open_test) = len(results), read_log(log)
            if open_test is not None:
                results[open_test] = Result("failed", f"the process ended with code {code} in this test")
                with log.open("a") as lines:
                    lines.write(json.dumps({"event": "end", "test": open_test, **vars(results[open_test])}) + "\n")
            elif code in (0, 1, 5) or len(results) == num_before:
                return results


def read_log(log: Path) -> tuple[dict[str, Result], str | None]:
    """Return the results in a log and the test that started last, if it has none."""
    results: dict[str, Result] = {}
    started = None
    for line in log.read_text().splitlines():
        entry = json.loads(line)
        if entry["event"] == "start":
            started = entry["test"]
        # A test that passed can still fail in its teardown, never the other way round.
        if entry["event"] == "end" and (entry["test"] not in results or entry["outcome"] == "failed"):
            results[entry["test"]] = Result(entry["outcome"], entry.get("text", ""))
    return results, started if started is not None and started not in results else None
