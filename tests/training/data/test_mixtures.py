"""A mixture trains each source's share of the tokens, every example at least once, the same in every run."""

import json

import numpy as np
import pytest
import torch

from lightning_fastft.core.errors import DataError, ResumeError
from lightning_fastft.training.data.describe import describe_data
from lightning_fastft.training.data.mixtures import mix_sources
from tests.support.datamodule_worker import make_data, make_rows, rows_in, run, run_and_resume

LENGTH_N = np.random.default_rng(0).integers(2, 90, 700)
SOURCE_N = np.repeat([0, 1, 2], [400, 260, 40])


def mix(weights, seed=0):
    index_M, sources = mix_sources(weights, length_N=LENGTH_N, source_N=SOURCE_N, seed=seed)
    return np.bincount(index_M, minlength=len(LENGTH_N)), sources


@pytest.mark.parametrize("weights", [(0.5, 0.3, 0.2), (5, 3, 2), (1, 1, 1), (0.01, 0.01, 0.98), (0.9, 0.05, 0.05)])
def test_shares_are_those_of_the_weights_and_every_example_is_trained(weights):
    times_N, sources = mix(dict(zip("abc", weights)))
    share_E = np.bincount(SOURCE_N, weights=times_N * LENGTH_N)
    share_E /= share_E.sum()
    assert np.allclose(share_E, np.array(weights) / sum(weights), atol=0.002)
    assert np.allclose([source.share for source in sources], share_E)
    assert times_N.min() == 1
    # Repeats are spread over the examples of a source, and one source has none.
    spread_E = [np.ptp(times_N[number == SOURCE_N]) for number in range(3)]
    assert max(spread_E) <= 1
    assert 1 in [times_N[number == SOURCE_N].max() for number in range(3)]
    assert [source.num_trained for source in sources] == np.bincount(SOURCE_N, weights=times_N).tolist()


def test_weights_like_the_sizes_repeat_nothing():
    times_N, _ = mix(dict(zip("abc", np.bincount(SOURCE_N, weights=LENGTH_N).tolist())))
    assert (times_N == 1).all()


def test_choice_follows_the_seed_alone():
    weights = {"a": 0.4, "b": 0.4, "c": 0.2}
    assert (mix(weights)[0] == mix(weights)[0]).all()
    assert (mix(weights)[0] != mix(weights, seed=1)[0]).any()


def test_source_without_examples_and_slips_of_weights_are_named():
    with pytest.raises(DataError, match="d of the mixture"):
        mix({"a": 1, "b": 1, "c": 1, "d": 1})
    with pytest.raises(DataError, match="each example of c"):
        mix({"a": 1e-6, "b": 1e-6, "c": 1})


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def mixture(tmp_path):
    """Two sources of 40 and 21 rows, the second in two files."""
    rows = make_rows()
    (tmp_path / "b").mkdir()
    write(tmp_path / "b" / "1.jsonl", rows[40:50])
    write(tmp_path / "b" / "2.jsonl", rows[50:])
    return {write(tmp_path / "a.jsonl", rows[:40]): 0.5, str(tmp_path / "b"): 0.5}


def test_sources_are_packed_together_and_repeats_are_trained(mixture):
    data = make_data(rows=mixture)
    data.setup("fit")
    batches = [rows_in(batch) for batch in data.train_dataloader()]
    times_N = np.bincount([row for batch in batches for row in batch], minlength=61)
    assert times_N[:40].tolist() == [1] * 40
    assert 1 < times_N[40:].mean() < 3
    assert any(min(batch) < 40 <= max(batch) for batch in batches)
    text = describe_data(data)
    assert all(name in text for name in mixture)
    assert [source.num_documents for source in data.mixture] == [40, 21]


def test_held_out_examples_are_not_repeated_or_trained(mixture):
    data = make_data(rows=mixture, val_share=0.3)
    data.setup("fit")
    trained, held_out = (data.subset(split).index_N for split in ("train", "val"))
    assert sorted({*trained, *held_out}) == list(range(61))
    assert len(set(held_out)) == len(held_out) == 61 - len(set(trained))


def test_grouping_of_files_has_a_cache_entry_of_its_own(tmp_path, mixture):
    first, second = list(mixture)
    cache = str(tmp_path / "cache")
    counts = []
    for paths in ([first, second], mixture, {first: 1, f"{second}/1.jsonl": 1, f"{second}/2.jsonl": 1}, mixture):
        data = make_data(rows=paths, cache_dir=cache)
        data.setup("fit")
        counts.append(data.report("train").documents_per_entry)
    assert counts == [[61], [40, 21], [40, 10, 11], [40, 21]]


def test_run_goes_on_bit_for_bit_and_other_weights_are_refused(tmp_path, mixture):
    whole, resumed = run_and_resume(tmp_path, save={"micro_batch": 25}, data={"rows": mixture}, trainer={})
    assert resumed.seen == whole.seen[25:]
    assert torch.equal(resumed.weight, whole.weight)
    with pytest.raises(ResumeError, match="weights was"):
        run(
            tmp_path,
            data={"rows": dict(zip(mixture, (0.4, 0.6)))},
            trainer={},
            ckpt_path=tmp_path / "saved.ckpt",
        )
