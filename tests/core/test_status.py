"""The table of what is active and why not."""

from lightning_fastft.core.status import Status, render_status_table


def test_table_shows_every_status_and_its_remedy():
    table = render_status_table(
        [Status("packed attention", "active", "varlen"), Status("expert router", "refused", "unknown layer", "update")]
    )
    lines = table.splitlines()
    assert lines[0].split() == ["optimisation", "state", "reason"]
    assert lines[1].split() == ["packed", "attention", "active", "varlen"]
    assert lines[3].strip() == "-> update"
    assert all(line == line.rstrip() for line in lines)
