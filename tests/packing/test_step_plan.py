import numpy as np
import pytest

from lightning_fastft.core.errors import OptionError
from lightning_fastft.packing.packs import pack_best_fit_decreasing
from lightning_fastft.packing.step_plan import StepPlan, mix_bits
from tests.packing.test_packs import lengths_of

STORED_BITS = [12888727951749679019, 16613338946343043936, 5167718485781182436]
STORED_ORDER = [12, 8, 11, 14, 9, 16, 15, 10, 5, 4, 17, 0, 2, 6, 19, 18, 7, 13, 3, 1]


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
