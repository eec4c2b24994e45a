"""``fastft report``: compare runs by the reports that RunReport wrote."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lightning_fastft.cli.arguments import Arguments, read_path
from lightning_fastft.core.checks import check_replaceable
from lightning_fastft.core.errors import OptionError
from lightning_fastft.core.files import find_write_obstacle

DEFAULT_PAGE = "runs/comparison.html"


def run_report(words: Sequence[str]) -> int:
    """Print a table of runs, write a page with their curves, and return 0.

    Args:
        words: Folders of runs or files of reports, and ``--out FILE``.
    """
    from lightning_fastft.monitor.report.comparison import TITLE, read_reports, render_comparison, render_table
    from lightning_fastft.packing.store.dataset import replace_file

    arguments = Arguments("report")
    arguments.add_argument("runs", nargs="*")
    arguments.add_argument("--out", default=DEFAULT_PAGE)
    given = arguments.read(words)
    page = read_path(given.out)
    if page.suffix != ".html":
        raise OptionError(f'--out must end in ".html", got {given.out!r}.')
    check_replaceable("The comparison (--out)", page, is_ours=lambda head: f"<title>{TITLE}".encode() in head)
    if obstacle := find_write_obstacle(page.parent):
        raise OptionError(f"--out: {page} cannot be written: {obstacle}. Name a file in another folder.")
    reports = read_reports(given.runs)
    page.parent.mkdir(parents=True, exist_ok=True)
    replace_file(page, render_comparison(reports).encode())
    sys.stdout.write(f"{render_table(reports)}\n\npage with the curves: {page}\n")
    return 0
