"""What is shown to a user holds no character that steers a terminal."""

import pytest

from lightning_fastft.core.errors import DataError, FastFTError, OptionError, list_names, printable
from lightning_fastft.packing.store.report import IngestReport

HOSTILE = "a\x1b[2Jb\x07\u202ec\rd"


def has_control(text):
    return any(character in text for character in "\x1b\x07\u202e\r")


@pytest.mark.parametrize("error", [FastFTError, DataError, OptionError])
def test_errors_escape_control_characters_and_keep_lines(error):
    text = str(error(f"{HOSTILE}\nsecond"))
    assert not has_control(text)
    assert text.endswith("\nsecond")


def test_printable_text_of_one_line_forges_no_second_one():
    assert "\n" not in printable("a\nb")
    assert printable("a\nb", keeps_lines=True) == "a\nb"


def test_report_of_rows_escapes_reasons_and_notes():
    report = IngestReport(num_rows=2, num_documents=1, num_tokens=4, num_labelled=2, rejects={HOSTILE: 1})
    assert "rejected" in report.render()
    assert not has_control(report.render())


def test_long_lists_of_names_are_cut():
    assert list_names([str(number) for number in range(10)]) == "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
