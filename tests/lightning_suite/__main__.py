"""Run Lightning's own tests with our strategy as the default of one device, and compare with a plain run.

    python -m tests.lightning_suite --tests FOLDER [--select callbacks/test_timer.py ...]

FOLDER is a checkout of Lightning's repository at the version that is installed, or its folder ``tests``. Every test
runs with ``Trainer(strategy="auto")`` resolving to "fastft"; those that fail run once more without it. A test that
fails only with ours must be in ``differences.txt``, with its reason; a listed test that passes must leave the list. The
exit code is 1 otherwise.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.lightning_suite.compare import compare, read_differences, render
from tests.lightning_suite.running import run_tests

DIFFERENCES = Path(__file__).with_name("differences.txt")


def main(arguments: list[str] | None = None) -> int:
    """Run, compare, print; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.lightning_suite", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tests", required=True, type=Path, help="a checkout of Lightning, or its folder tests")
    parser.add_argument(
        "--select", nargs="*", default=[], help="files or folders below tests_pytorch; all of it by default"
    )
    parser.add_argument("--strategy", default="fastft", help='what strategy="auto" becomes')
    parser.add_argument("--seconds", type=float, default=120.0, help="the longest that one test may take")
    parser.add_argument("--out", type=Path, help="a folder for the logs; a temporary one by default")
    options = parser.parse_args(arguments)
    root = next((path for path in (options.tests, options.tests / "tests") if (path / "tests_pytorch").is_dir()), None)
    if root is None:
        parser.error(
            f"{options.tests} holds no tests_pytorch; give a checkout of github.com/Lightning-AI/pytorch-lightning or "
            "its folder tests."
        )
    if options.out is not None:
        return _compare_in(options.out.resolve(), root.resolve(), options)
    with tempfile.TemporaryDirectory() as folder:
        return _compare_in(Path(folder), root.resolve(), options)


def _compare_in(out: Path, root: Path, options: argparse.Namespace) -> int:
    out.mkdir(parents=True, exist_ok=True)
    where = {"root": root, "select": options.select, "seconds": options.seconds}
    ours = run_tests(out=out / "ours", strategy=options.strategy, **where)
    failed = sorted(test for test, result in ours.items() if result.outcome == "failed")
    plain = run_tests(out=out / "plain", strategy="", only=failed, **where) if failed else {}
    comparison = compare(ours, plain, read_differences(DIFFERENCES), is_whole=not options.select)
    sys.stdout.write(render(comparison))
    return 0 if comparison.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
