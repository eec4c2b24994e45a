"""The store keeps prompts, completions, scores and log-probabilities in memory and in files, and sees damage."""

import json
import pickle

import numpy as np
import pytest

from lightning_fastft.core.errors import DataError
from lightning_fastft.packing.rows.formats import FormatOptions
from lightning_fastft.packing.store import ingest
from lightning_fastft.packing.store.cache import tokenize_sources
from lightning_fastft.packing.store.completion_store import CompletionStore
from lightning_fastft.packing.store.dataset import TokenizedDataset, digest_file, digest_meta
from tests.packing.conftest import build_tokenizer

NAMES = ["segment_lengths.bin", "first_segment.bin", "scores.bin", "log_probs.bin"]


def make_rows(number=40, *, has_log_probs=True):
    rows = []
    for index in range(number):
        completions = [[5 + index % 7] * length for length in range(1, 2 + index % 3)]
        row = {"prompt_ids": [1 + index % 4] * (1 + index % 5), "completion_ids": completions}
        row["rewards"] = [0.5 * index - place for place in range(len(completions))]
        # Only some rows have them.
        if has_log_probs and index % 3 == 1:
            row["log_probs"] = [[-0.25 * (index + place) for place in range(len(ids))] for ids in completions]
        rows.append(row)
    return rows


def tokenize(rows, **changes):
    return tokenize_sources(rows, tokenizer=None, options=FormatOptions(max_tokens=64), **changes)


def read(dataset):
    return [
        (
            document.input_ids.tolist(),
            document.labels.tolist(),
            document.segment_lengths,
            document.scores,
            None if document.log_probs is None else document.log_probs.tolist(),
        )
        for document in dataset
    ]


def expected(rows):
    documents = []
    for row in rows:
        prompt, completions = row["prompt_ids"], row["completion_ids"]
        behind = [token for ids in completions for token in ids]
        log_probs = row.get("log_probs")
        documents.append(
            (
                prompt + behind,
                [-100] * len(prompt) + behind,
                (len(prompt), *map(len, completions)),
                tuple(row["rewards"]),
                log_probs and [0.0] * len(prompt) + [value for values in log_probs for value in values],
            )
        )
    return documents


@pytest.mark.parametrize("has_log_probs", [True, False])
def test_documents_are_whole_in_memory_in_files_and_pickled(tmp_path, has_log_probs):
    rows = make_rows(has_log_probs=has_log_probs)
    in_memory, on_disk = tokenize(rows), tokenize(rows, cache_dir=tmp_path)
    again = tokenize(rows, cache_dir=tmp_path)
    datasets = [in_memory, on_disk, again, *(pickle.loads(pickle.dumps(one)) for one in (in_memory, on_disk))]
    for dataset in datasets:
        assert read(dataset) == expected(rows)
        assert ("log_probs" in dataset.completions.arrays) == has_log_probs
    assert len({dataset.content_digest for dataset in datasets}) == 1
    assert (on_disk.path / "log_probs.bin").exists() == has_log_probs
    assert isinstance(on_disk.completions.arrays["scores"], np.memmap)


def test_counts_of_all_examples_are_those_of_each():
    rows = make_rows()
    dataset = tokenize(rows)
    store = dataset.completions
    assert store.num_prompt_tokens_N.tolist() == [len(row["prompt_ids"]) for row in rows]
    assert store.num_completions_N.tolist() == [len(row["completion_ids"]) for row in rows]
    assert store.num_completion_tokens_N.tolist() == [sum(map(len, row["completion_ids"])) for row in rows]
    assert {counts.dtype for counts in (store.num_prompt_tokens_N, store.num_completion_tokens_N)} == {np.dtype("i8")}
    assert dataset.num_labelled_N.tolist() == store.num_completion_tokens_N.tolist()


def test_digest_follows_borders_scores_and_log_probs():
    row = {"prompt_ids": [1, 2], "completion_ids": [[3], [4]], "rewards": [1, 0], "log_probs": [[-1], [-2]]}
    changed = [
        {**row, "rewards": [0, 1]},
        {**row, "log_probs": [[-2], [-1]]},
        {**row, "completion_ids": [[3, 4]], "rewards": [1], "log_probs": [[-1, -2]]},
    ]
    assert len({tokenize([one]).content_digest for one in (row, *changed)}) == 4


def test_rows_with_other_scores_are_no_duplicates():
    row = {"prompt_ids": [1, 2], "completion_ids": [[3]], "rewards": [1]}
    assert tokenize([row, {**row, "rewards": [0]}, row]).report.num_duplicates == 1


def test_completions_pass_through_the_pipes_of_workers(monkeypatch):
    """Workers are those of all data (see test_cache.py): what they get and return is pickled."""
    run_chunks = ingest.run_chunks

    def pickled(value):
        return pickle.loads(pickle.dumps(value))

    def run_pickled(chunks, *, setup, num_proc):
        yield from map(pickled, run_chunks(map(pickled, chunks), setup=pickled(setup), num_proc=num_proc))

    rows = make_rows(400)
    whole = read(tokenize(rows))
    monkeypatch.setattr(ingest, "run_chunks", run_pickled)
    assert read(tokenize(rows)) == whole == expected(rows)


@pytest.mark.covering
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["bit", "cut", "gone"])
def test_damage_of_any_file_is_seen_and_repaired(tmp_path, name, kind, caplog):
    rows = make_rows()
    path = tokenize(rows, cache_dir=tmp_path).path / name
    content = bytearray(path.read_bytes())
    if kind == "gone":
        path.unlink()
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content if kind == "bit" else content[:-8])
    with pytest.raises(DataError, match="Delete the folder"):
        TokenizedDataset.open(path.parent)
    assert read(tokenize(rows, cache_dir=tmp_path)) == expected(rows)
    assert "deleted" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"segment_lengths": [2, 1, 1, 2, 2]},
        {"segment_lengths": [2, 2, 0, 2, 1]},
        {"segment_lengths": [2, 1, 1, 2]},
        {"first_segment": [0, 4, 5]},
        {"first_segment": [0, 3, 6]},
        {"first_segment": [1, 3, 5]},
        {"first_segment": [0, 5]},
        {"first_segment": [0, 6, 5]},
        {"scores": [1, 0]},
        {"log_probs": [0, 0]},
    ],
)
def test_impossible_bounds_are_refused(change):
    good = {"segment_lengths": [2, 1, 1, 2, 1], "first_segment": [0, 3, 5], "scores": [1, 0, 1]}
    length_N = np.array([4, 3])

    def build(arrays):
        return CompletionStore(
            {name: np.asarray(values, dtype=CompletionStore.DTYPES[name]) for name, values in arrays.items()}
        )

    build(good).check_bounds(length_N=length_N)
    with pytest.raises(DataError):
        build(good | change).check_bounds(length_N=length_N)


def test_entry_with_impossible_bounds_is_refused(tmp_path):
    path = tokenize(make_rows(), cache_dir=tmp_path).path
    scores = path / "scores.bin"
    scores.write_bytes(scores.read_bytes()[:-4])
    meta = json.loads((path / "meta.json").read_text())
    meta["sha256"]["scores.bin"] = digest_file(scores)
    (path / "meta.json").write_text(json.dumps(meta | {"own_sha256": digest_meta(meta)}))
    for is_checked in (True, False):
        with pytest.raises(DataError, match="scores"):
            TokenizedDataset.open(path, is_checked=is_checked)


def test_entry_without_completions_has_no_file_of_them(tmp_path):
    dataset = tokenize([{"input_ids": [1, 2, 3]}], cache_dir=tmp_path)
    assert dataset.completions is None
    assert dataset[0].segment_lengths == ()
    digests = json.loads((dataset.path / "meta.json").read_text())["sha256"]
    assert sorted(digests) == ["ids.bin", "num_labelled.bin", "rejected.jsonl", "start.bin", "trained.bin"]


def test_entry_without_completions_keeps_its_digests():
    # Checkpoints name their data by the first, the cache its entries by the second: formats that are added change
    # neither.
    dataset = tokenize([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, {"input_ids": [4, 5], "labels": [-100, 5]}])
    assert dataset.content_digest == "f1a93d252e383575f8788618adc71501d716d19b8025912ad9d80b77b439668e"
    assert dataset.fingerprint == "e7a2f538f3b56a00051d7cbd87ee68688473734d127ffd6fe69218b97b1b717b"


def test_pairs_of_text_are_read_from_the_cache(tmp_path):
    rows = [{"prompt": "two plus two", "chosen": f" is {number}", "rejected": " is x"} for number in range(5)]
    run = {"tokenizer": build_tokenizer(), "options": FormatOptions(max_tokens=64), "cache_dir": tmp_path}
    first, second = tokenize_sources(rows, **run), tokenize_sources(rows, **run)
    assert read(first) == read(second)
    assert second.report.rows_per_format == {"preference": 5}
