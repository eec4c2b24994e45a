"""IngestReport: counts of the rows of a data set that were read, rejected, truncated and kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_fastft.core.errors import printable


@dataclass(kw_only=True)
class IngestReport:
    """Count rows that were read, rejected, truncated and kept.

    Args:
        num_rows: Rows read, without blank lines.
        num_documents: Examples kept; each piece of a split row counts.
        num_tokens: Tokens of the examples kept.
        num_labelled: Trained tokens of the examples kept, without the first token of each.
        num_blank_lines: Blank lines.
        rows_per_format: Rows by format.
        rows_per_source: Rows by file or data set.
        documents_per_entry: Examples kept of each source of a mixture; one number without a mixture.
        unread_columns: Columns with values that the format of their rows does not read.
        rejects: Rejected rows by reason.
        num_too_long: Rows of more than max_tokens.
        num_truncated: Of these, rows that were truncated and kept.
        num_split: Of these, rows that were split.
        num_dropped_pieces: Pieces of split rows without trained tokens.
        num_duplicates: Rows with the same tokens and labels as another row; they are kept.
        num_plain: Rows of plain text, although there is a chat template.
        longest: Tokens of the longest row before truncation, as a pack counts them.
        longest_place: Source and line of that row.
        highest_id: Highest token id kept.
        highest_id_place: Source and line of its first use.
        notes: Remarks on how rows were read.
    """

    num_rows: int = 0
    num_documents: int = 0
    num_tokens: int = 0
    num_labelled: int = 0
    num_blank_lines: int = 0
    rows_per_format: dict[str, int] = field(default_factory=dict)
    rows_per_source: dict[str, int] = field(default_factory=dict)
    documents_per_entry: list[int] = field(default_factory=list)
    unread_columns: list[str] = field(default_factory=list)
    rejects: dict[str, int] = field(default_factory=dict)
    num_too_long: int = 0
    num_truncated: int = 0
    num_split: int = 0
    num_dropped_pieces: int = 0
    num_duplicates: int = 0
    num_plain: int = 0
    longest: int = 0
    longest_place: str = ""
    highest_id: int = -1
    highest_id_place: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def num_rejected(self) -> int:
        """Number of rejected rows."""
        return sum(self.rejects.values())

    @property
    def is_plain(self) -> bool:
        """Whether no row is formatted by the chat template that there is."""
        return 0 < self.num_rows - self.num_rejected <= self.num_plain

    @property
    def reject_share(self) -> float:
        """Share of rejected rows."""
        return self.num_rejected / max(1, self.num_rows)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> IngestReport:
        """Return the report of a ``to_dict`` result."""
        return cls(**values)

    def render(self) -> str:
        """Return the report as text.

        Example:
            >>> counts = {"num_rows": 3, "num_documents": 2, "num_tokens": 9, "num_labelled": 4}
            >>> print(IngestReport(**counts, rejects={"empty text": 1}).render())
            3 rows, 2 examples, 9 tokens, 4 trained (44.4 %)
            rejected: 1 (33.33 %): empty text 1
        """
        share = 100 * self.num_labelled / max(1, self.num_tokens)
        lines = [
            f"{self.num_rows:,} rows, {self.num_documents:,} examples, {self.num_tokens:,} tokens, "
            f"{self.num_labelled:,} trained ({share:.1f} %)"
        ]
        if self.rows_per_format:
            lines.append("formats: " + render_counts(self.rows_per_format))
        if len(self.rows_per_source) > 1:
            lines.append("sources: " + render_counts(self.rows_per_source, most=8))
        if self.unread_columns:
            lines.append("columns not read: " + ", ".join(self.unread_columns))
        if self.rejects:
            lines.append(
                f"rejected: {self.num_rejected} ({100 * self.reject_share:.2f} %): {render_counts(self.rejects)}"
            )
        if self.num_blank_lines:
            lines.append(f"blank lines: {self.num_blank_lines}")
        if self.num_too_long:
            lines.append(
                f"too long: {self.num_too_long} (longest {self.longest} tokens, {self.longest_place}); "
                f"truncated {self.num_truncated}, split {self.num_split}, pieces dropped {self.num_dropped_pieces}"
            )
        if self.num_duplicates:
            lines.append(f"duplicates: {self.num_duplicates}, kept")
        return "\n".join(printable(line) for line in (*lines, *(f"note: {note}" for note in self.notes)))


def render_counts(counts: Mapping[str, int], *, most: int = 100) -> str:
    """Return names and counts, highest count first, for example "empty text 3, wrong type 1"."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(f"{name} {count}" for name, count in ordered[:most])
    return shown if len(ordered) <= most else f"{shown}, and {len(ordered) - most} more"
