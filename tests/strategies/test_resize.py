"""What some ranks saved, others resume: the same weights and moments, and every example of the epoch trained once."""

import json

import pytest
import torch

from tests.strategies.resize_worker import NUM_ROWS
from tests.support.two_ranks import run_two_ranks

MODULE = "tests.strategies.resize_worker"
# Saved by, and resumed by: strategy and number of ranks; and the bits of the moments.
SAVED = {
    "one": ("one", 1, 32),
    "ddp": ("ddp", 2, 32),
    "folder": ("fsdp", 2, 8),
    "folder of four": ("fsdp", 4, 8),
    "wide folder": ("fsdp", 2, 32),
    "file": ("fsdp file", 2, 32),
    "hybrid": ("hybrid", 4, 8),
}
# The table of docs/reliability.md: saved by, and the strategies of 1 to 4 ranks that resume.
MATRIX = {
    "one": ("one", "ddp", "ddp", "fsdp"),
    "ddp": ("one", "ddp", "ddp", "ddp"),
    "folder": ("fsdp",) * 4,
    "folder of four": ("fsdp",) * 4,
}
OTHERS = [
    ("folder", "hybrid", 4),
    ("wide folder", "fsdp", 3),
    ("file", "one", 1),
    ("file", "ddp", 3),
    ("file", "fsdp", 4),
    ("hybrid", "fsdp", 2),
    ("hybrid", "fsdp", 3),
    ("ddp", "fsdp file", 3),
    ("one", "fsdp", 2),
]
IN_EVERY_RUN = [("folder", "fsdp", 1), ("folder", "fsdp", 3), ("one", "fsdp", 2)]
CELLS = [(name, strategy, rank + 1) for name, row in MATRIX.items() for rank, strategy in enumerate(row)] + OTHERS
RESUMED = [pytest.param(*cell, marks=pytest.mark.slow if cell in IN_EVERY_RUN else pytest.mark.fault) for cell in CELLS]


def rows_of(folder):
    return [row for path in sorted(folder.glob("rows-*.json")) for row in json.loads(path.read_text())]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    done = {}

    def look_up(name):
        if name not in done:
            folder = tmp_path_factory.mktemp(name)
            strategy, num_ranks, bits = SAVED[name]
            run_two_ranks(MODULE, folder, strategy, "save", folder / "saved.ckpt", bits, num_ranks=num_ranks)
            done[name] = folder
        return done[name]

    return look_up


@pytest.mark.parametrize(("name", "strategy", "num_ranks"), RESUMED)
def test_other_ranks_go_on_from_a_checkpoint(saved, tmp_path, name, strategy, num_ranks):
    folder = saved(name)
    run_two_ranks(MODULE, tmp_path, strategy, "resume", folder / "saved.ckpt", SAVED[name][2], num_ranks=num_ranks)
    before, after = (torch.load(place / "state.pt", weights_only=True) for place in (folder, tmp_path))
    assert before["weights"].keys() == after["weights"].keys()
    assert all(torch.equal(value, after["weights"][key]) for key, value in before["weights"].items())
    assert torch.equal(before["moments"], after["moments"])
    first = rows_of(folder)
    assert 0 < len(first) < NUM_ROWS
    assert sorted([*first, *rows_of(tmp_path)]) == list(range(NUM_ROWS))
