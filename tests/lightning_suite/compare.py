"""Compare a run with our strategy with a plain one, and both with the list of deliberate differences."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.lightning_suite.running import Result


class Difference(NamedTuple):
    """A line of the list: which tests, the group it is in, and why they may fail with ours."""

    pattern: str
    group: str
    reason: str

    def fits(self, test: str) -> bool:
        """Return whether the pattern names the test; only ``*`` is special in it."""
        return (
            re.fullmatch(".*".join(map(re.escape, self.pattern.split("*"))), test.removeprefix("tests_pytorch/"))
            is not None
        )


@dataclass(frozen=True)
class Comparison:
    """The tests of a run by what became of them."""

    num_passed: int
    num_skipped: int
    failed_in_both: list[str]
    listed: dict[str, Difference]
    unlisted: dict[str, str]
    stale: list[Difference]

    @property
    def is_clean(self) -> bool:
        """Whether each difference is listed and each listed one is a difference."""
        return not self.unlisted and not self.stale


def read_differences(path: Path) -> list[Difference]:
    """Return the lines of a list: ``[group]`` headings, then ``pattern  # reason``; lines that start with # are
    comments.
    """
    group, found = "", []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        text = line.strip()
        if text.startswith("[") and text.endswith("]"):
            group = text[1:-1]
        elif text and not text.startswith("#"):
            pattern, _, reason = text.partition("  # ")
            if not group or not reason.strip():
                raise ValueError(
                    f"{path.name}:{number}: a line needs a [group] above it and a reason behind '  # ', got {text!r}."
                )
            found.append(Difference(pattern.strip(), group, reason.strip()))
    return found


def compare(
    ours: dict[str, Result], plain: dict[str, Result], differences: list[Difference], *, is_whole: bool
) -> Comparison:
    """Return what became of the tests.

    Args:
        ours: Results with our strategy.
        plain: Results without it, of the tests that failed with it.
        differences: The list.
        is_whole: Whether all tests ran, so that a line that names none is stale.
    """
    failed = [test for test, result in ours.items() if result.outcome == "failed"]
    only_ours = [test for test in failed if test not in plain or plain[test].outcome != "failed"]
    listed = {test: line for test in only_ours for line in differences if line.fits(test)}
    passed = [test for test, result in ours.items() if result.outcome == "passed"]
    return Comparison(
        num_passed=len(passed),
        num_skipped=sum(result.outcome == "skipped" for result in ours.values()),
        failed_in_both=sorted(set(failed) - set(only_ours)),
        listed=listed,
        unlisted={test: _last_line(ours[test].text) for test in only_ours if test not in listed},
        stale=[
            line for line in differences if any(map(line.fits, passed)) or (is_whole and not any(map(line.fits, ours)))
        ],
    )


def render(comparison: Comparison) -> str:
    """Return the comparison as text."""
    groups = Counter(line.group for line in comparison.listed.values())
    lines = [
        f"{comparison.num_passed} passed with our strategy, {comparison.num_skipped} skipped, "
        f"{len(comparison.failed_in_both)} failed in both, "
        f"{len(comparison.listed)} listed differences, {len(comparison.unlisted)} others",
        *(f"  {count:4} {group}" for group, count in groups.items()),
        *(f"failed in both: {test}" for test in comparison.failed_in_both),
        *(f"FAILED ONLY WITH OURS: {test}: {text}" for test, text in comparison.unlisted.items()),
        *(f"STALE in differences.txt, it passes or is gone: {line.pattern}" for line in comparison.stale),
    ]
    return "\n".join(lines) + "\n"


def _last_line(text: str) -> str:
    errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return (errors or text.strip().splitlines() or [""])[-1]
