import json
from pathlib import Path

import numpy as np
import pytest

from lightning_fastft.core.errors import DataError, OptionError
from lightning_fastft.packing.planner import StepPlan, mix_bits, pack_best_fit_decreasing, split_to_multiple

GSM8K = Path(__file__).parents[3] / "shared" / "data"
STORED_BITS = [12888727951749679019, 16613338946343043936, 5167718485781182436]
STORED_ORDER = [12, 8, 11, 14, 9, 16, 15, 10, 5, 4, 17, 0, 2, 6, 19, 18, 7, 13, 3, 1]


def lengths_of(kind: str, num_documents: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    if kind == "log-normal":
        return np.clip(generator.lognormal(6.0, 0.8, num_documents).astype(np.int64), 8, 4096)
    if kind == "short":
        return generator.integers(1, 30, num_documents)
    return generator.integers(50, 400, num_documents)


def plan_of(length_N, *, max_tokens=4096, labelled_N=None, seed=0, world_size=1, accumulate=1, **options) -> StepPlan:
    packs = pack_best_fit_decreasing(length_N, max_tokens=max_tokens)
    labelled_N = length_N - 1 if labelled_N is None else labelled_N
    return StepPlan(
        packs,
        length_N=length_N,
        num_labelled_N=labelled_N,
        seed=seed,
        world_size=world_size,
        accumulate=accumulate,
        **options,
    )


def documents_of(plan: StepPlan, epoch: int = 0) -> list[int]:
    epoch_plan = plan.epoch(epoch)
    return [
        int(document)
        for micro_batch in range(len(epoch_plan))
        for rank in range(plan.world_size)
        for document in epoch_plan.documents(rank=rank, micro_batch=micro_batch)
    ]


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
    assert whole.num_split == len(whole) - len(packs) < multiple
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


@pytest.mark.slow
def test_plan_trains_every_document_once_per_epoch_in_500_random_plans():
    generator = np.random.default_rng(0)
    for _ in range(500):
        num_documents = int(generator.integers(1, 120))
        length_N = generator.integers(1, 60, num_documents)
        world_size, accumulate = int(generator.integers(1, 6)), int(generator.integers(1, 5))
        plan = plan_of(
            length_N,
            max_tokens=int(generator.integers(60, 400)),
            seed=int(generator.integers(0, 99)),
            world_size=world_size,
            accumulate=accumulate,
        )
        assert plan.num_micro_batches % accumulate == 0
        for epoch in (0, 1):
            assert len(plan.epoch(epoch)) == plan.num_micro_batches
            assert sorted(documents_of(plan, epoch)) == list(range(num_documents))


@pytest.mark.parametrize("world_size", [1, 2])
def test_plan_is_the_same_in_every_process_and_differs_by_epoch_and_seed(world_size):
    length_N = lengths_of("even", 2000)
    same = [plan_of(length_N, seed=3, world_size=world_size, accumulate=3).epoch(5).pack_MR for _ in range(2)]
    assert (same[0] == same[1]).all()
    assert not (same[0] == plan_of(length_N, seed=3, world_size=world_size, accumulate=3).epoch(6).pack_MR).all()
    assert not (same[0] == plan_of(length_N, seed=4, world_size=world_size, accumulate=3).epoch(5).pack_MR).all()


def test_shuffle_stays_the_same_across_versions():
    # Stored when the rule was made: a change here breaks the resume of every run under way, so raise PLAN_VERSION with
    # it.
    assert mix_bits(np.arange(3, dtype=np.uint64), seed=1, stream=2).tolist() == STORED_BITS
    assert plan_of(np.full(40, 50), max_tokens=100, seed=7).epoch(1).pack_MR[:, 0].tolist() == STORED_ORDER


# Measured 1.032, 1.019, 1.058, 1.040; without levelling inside the window 1.028 and 1.061 for accumulate 3.
@pytest.mark.parametrize(
    ("world_size", "accumulate", "most"), [(2, 1, 1.04), (2, 3, 1.023), (8, 1, 1.07), (8, 3, 1.05)]
)
def test_ranks_carry_like_attention_cost(world_size, accumulate, most):
    length_N = lengths_of("log-normal", 20_000)
    plan = plan_of(length_N, world_size=world_size, accumulate=accumulate)
    pack_MR = plan.epoch(0).pack_MR
    window_WAR = plan.cost_P[pack_MR].reshape(-1, accumulate, world_size)
    load_WR = window_WAR.sum(axis=1)
    waiting = load_WR.max(axis=1).sum() / load_WR.mean(axis=1).sum()
    random_PR = plan.cost_P[
        np.random.default_rng(0).permutation(len(plan.packs)).reshape(-1, accumulate, world_size)
    ].sum(axis=1)
    waiting_random = random_PR.max(axis=1).sum() / random_PR.mean(axis=1).sum()
    assert waiting < most
    assert waiting - 1 < (waiting_random - 1) / 3


@pytest.mark.parametrize("world_size", [1, 4])
def test_order_of_the_packs_stays_random(world_size):
    plan = plan_of(lengths_of("log-normal", 20_000), world_size=world_size)
    cost_M = plan.cost_P[plan.epoch(0).pack_MR].mean(axis=1)
    rank_M = np.argsort(np.argsort(cost_M))
    trend = np.corrcoef(rank_M, np.arange(len(rank_M)))[0, 1]
    neighbours = np.corrcoef(rank_M[1:], rank_M[:-1])[0, 1]
    assert abs(trend) < 0.1
    assert abs(neighbours) < 0.1


@pytest.mark.parametrize("limit", [None, 5, 7, 0.5])
def test_num_items_gives_the_token_mean_of_each_window(limit):
    length_N = lengths_of("even", 600)
    labelled_N = np.random.default_rng(1).integers(0, length_N)
    plan = plan_of(length_N, labelled_N=labelled_N, world_size=2, accumulate=3, limit=limit)
    epoch_plan = plan.epoch(0)
    assert len(epoch_plan) == {None: plan.num_micro_batches, 5: 5, 7: 7, 0.5: len(plan.packs) // 2 // 2}[limit]
    for begin in range(0, len(epoch_plan), 3):
        window = range(begin, min(begin + 3, len(epoch_plan)))
        tokens = sum(
            int(labelled_N[epoch_plan.documents(rank=rank, micro_batch=m)].sum()) for m in window for rank in (0, 1)
        )
        for micro_batch in window:
            # Lightning divides by accumulate_grad_batches, also in a window that limit_train_batches cuts short, and
            # ranks are averaged.
            assert epoch_plan.num_items_M[micro_batch] * 3 * 2 == pytest.approx(tokens, rel=1e-12)


def test_num_items_is_above_zero_where_nothing_is_labelled():
    length_N = lengths_of("even", 60)
    plan = plan_of(length_N, labelled_N=np.zeros_like(length_N), accumulate=2)
    assert (plan.epoch(0).num_items_M == 1.0).all()


def test_plan_without_shuffle_keeps_the_order_and_equal_ranks():
    length_N = lengths_of("even", 600)
    plan = plan_of(length_N, world_size=4, shuffle=False)
    assert plan.epoch(0).pack_MR.ravel().tolist() == list(range(len(plan.packs)))
    assert (plan.epoch(0).pack_MR == plan.epoch(1).pack_MR).all()


@pytest.mark.parametrize("option", [{"world_size": 0}, {"accumulate": 0}, {"seed": -1}])
def test_plan_refuses_options_outside_of_their_range(option):
    with pytest.raises(OptionError, match=next(iter(option))):
        plan_of(np.array([3, 4]), max_tokens=8, **option)
