import json
from pathlib import Path

import numpy as np
import pytest

from lightning_fastft.core.errors import DataError
from lightning_fastft.packing.packs import pack_best_fit_decreasing, split_to_multiple

GSM8K = Path(__file__).parents[3] / "shared" / "data"


def lengths_of(kind: str, num_documents: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    if kind == "log-normal":
        return np.clip(generator.lognormal(6.0, 0.8, num_documents).astype(np.int64), 8, 4096)
    if kind == "short":
        return generator.integers(1, 30, num_documents)
    return generator.integers(50, 400, num_documents)


@pytest.mark.parametrize("kind", ["log-normal", "short", "even"])
@pytest.mark.parametrize("num_documents", [1, 2, 997, 5000])
@pytest.mark.parametrize("max_tokens", [4096, 8191])
def test_pack_holds_every_document_once_and_no_pack_overflows(kind, num_documents, max_tokens):
    length_N = lengths_of(kind, num_documents)
    packs = pack_best_fit_decreasing(length_N, max_tokens=max_tokens)
    assert sorted(packs.document_N.tolist()) == list(range(num_documents))
    assert packs.sum_per_pack(length_N).max() <= max_tokens
    assert (np.diff(packs.start_P1) > 0).all()


def test_pack_fills_60000_documents_to_999_per_mille():
    length_N = lengths_of("log-normal", 60_000)
    packs = pack_best_fit_decreasing(length_N, max_tokens=4096)
    assert packs.fill(length_N) >= 0.999


@pytest.mark.parametrize("seed", range(5))
def test_pack_meets_the_ceiling_even_where_no_token_of_room_is_left(seed):
    length_N = lengths_of("even", 3000, seed=seed)
    missing = -int(length_N.sum()) % 4096
    short_N = np.flatnonzero(length_N < 400 - missing // 1000)
    for step in range(missing):
        length_N[short_N[step % len(short_N)]] += 1
    packs = pack_best_fit_decreasing(length_N, max_tokens=4096)
    assert length_N.sum() % 4096 == 0
    assert len(packs) == length_N.sum() // 4096
    assert packs.sum_per_pack(length_N).max() <= 4096


@pytest.fixture(scope="module")
def gsm8k_lengths():
    if not GSM8K.exists():
        pytest.skip("needs ../shared/data")
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.ByteLevelBPETokenizer(
        str(GSM8K / "gpt2_bpe" / "vocab.json"), str(GSM8K / "gpt2_bpe" / "merges.txt")
    )
    rows = {split: (GSM8K / "gsm8k" / f"{split}.jsonl").read_text().splitlines() for split in ("train", "test")}
    texts = {
        split: [row["question"] + row["answer"] for row in map(json.loads, lines)] for split, lines in rows.items()
    }
    return {
        split: np.array([len(entry.ids) for entry in tokenizer.encode_batch(text)]) for split, text in texts.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [4096, 8192])
@pytest.mark.parametrize("split", ["train", "test"])
def test_pack_of_gsm8k_meets_the_ceiling(gsm8k_lengths, max_tokens, split):
    # Formats add tokens; the ceiling must not hang on how many.
    for extra in (0, 1, 7, 25):
        length_N = gsm8k_lengths[split] + extra
        packs = pack_best_fit_decreasing(length_N, max_tokens=max_tokens)
        assert len(packs) == -(-int(length_N.sum()) // max_tokens)


def test_pack_is_no_worse_where_no_better_packing_exists():
    assert len(pack_best_fit_decreasing(np.full(60, 100), max_tokens=199)) == 60
    assert len(pack_best_fit_decreasing(np.array([6, 5, 4, 4, 3, 2]), max_tokens=8)) == 3
    assert len(pack_best_fit_decreasing(np.array([4, 4, 4]), max_tokens=4)) == 3


@pytest.mark.parametrize(("lengths", "word"), [([], "no documents"), ([3, 0], "Document 1"), ([3, 9], "max_tokens=8")])
def test_pack_refuses_what_cannot_be_packed(lengths, word):
    with pytest.raises(DataError, match=word):
        pack_best_fit_decreasing(np.array(lengths, dtype=np.int64), max_tokens=8)


@pytest.mark.parametrize("multiple", [1, 2, 3, 7, 64])
def test_split_keeps_documents_and_takes_the_packs_with_most(multiple):
    length_N = lengths_of("even", 700)
    packs = pack_best_fit_decreasing(length_N, max_tokens=4096)
    largest = np.diff(packs.start_P1).max()
    whole = split_to_multiple(packs, length_N, multiple=multiple)
    assert len(whole) % multiple == 0
    assert len(whole) - len(packs) < multiple
    assert sorted(whole.document_N.tolist()) == list(range(700))
    assert (np.diff(whole.start_P1) > 0).all()
    assert np.diff(whole.start_P1).max() <= largest


def test_split_halves_the_pack_with_most_documents_by_tokens():
    length_N = np.array([10] * 9 + [89, 1])
    packs = pack_best_fit_decreasing(length_N, max_tokens=90)
    whole = split_to_multiple(packs, length_N, multiple=3)
    assert sorted(whole.sum_per_pack(length_N).tolist()) == [40, 50, 90]


def test_split_adds_empty_packs_only_where_documents_run_out():
    length_N = np.array([4, 4, 4])
    packs = pack_best_fit_decreasing(length_N, max_tokens=12)
    assert np.diff(split_to_multiple(packs, length_N, multiple=3).start_P1).tolist() == [1, 1, 1]
    whole = split_to_multiple(packs, length_N, multiple=5)
    assert sorted(np.diff(whole.start_P1).tolist()) == [0, 0, 1, 1, 1]
    assert sorted(whole.document_N.tolist()) == [0, 1, 2]
