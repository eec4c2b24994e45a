"""Documents of a data set as a module needs them: which validation examples are trained too."""

import logging

import numpy as np
import pytest

from lightning_fastft.training.data.subsets import count_shared
from tests.support.datamodule_worker import make_data, make_rows

ROWS = make_rows(200)


@pytest.mark.parametrize(
    ("options", "num_shared"),
    [
        ({"rows": ROWS[:150], "val_paths": ROWS[150:]}, 0),
        ({"rows": ROWS[:160], "val_paths": ROWS[150:]}, 10),
        ({"rows": ROWS, "val_paths": {"a": ROWS[150:170], "b": ROWS[170:]}}, 50),
        # Each example twice, so that the copy of most held-out ones is trained.
        ({"rows": ROWS + ROWS, "val_share": 0.1}, None),
        ({"rows": ROWS, "val_share": 0.1}, 0),
        ({"rows": ROWS}, 0),
    ],
)
def test_validation_examples_that_are_trained_too_are_counted_and_logged(caplog, options, num_shared):
    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    data = make_data(**options)
    data.setup("fit")
    found = data.subset("val")
    if num_shared is None:
        held_out, trained = (
            {tuple(part[n].input_ids) for n in range(len(part))} for part in (found, data.subset("train"))
        )
        num_shared = sum(tuple(found[number].input_ids) in trained for number in range(len(found)))
        assert num_shared > len(held_out) // 2
    said = [record.getMessage() for record in caplog.records if "validation examples are training" in record.message]
    assert all(text.startswith(f"{num_shared} of {len(found)} ") for text in said)
    assert len(said) == (1 if num_shared else 0)


def test_examples_that_differ_in_one_token_or_their_length_are_not_shared():
    long = list(range(50))
    near = [[*long[:number], 60, *long[number + 1 :]] for number in range(50)] + [long[:-1], [*long, 1]]
    data = make_data(rows=[{"input_ids": ids} for ids in near], val_paths=[{"input_ids": long}])
    data.setup("fit")
    assert count_shared(data.subset("val"), trained=data.subset("train")) == 0
    # Many of them differ only where no token is sampled.
    hashes = data.subset("train").documents.hash_samples(np.arange(len(near)))
    assert 2 < len(set(hashes.tolist())) < len(near) // 2
    for part in ("val", "train"):
        assert count_shared(data.subset(part), trained=data.subset(part)) == len(data.subset(part))
