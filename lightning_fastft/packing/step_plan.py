"""StepPlan: which pack each rank trains in each micro-batch, in integers.

Axes: N documents, P packs, M micro-batches of one rank in one epoch, R ranks, A micro-batches of an accumulation
window, G groups of one pack per rank.
"""

from __future__ import annotations

import numpy as np

from lightning_fastft.core.checks import check_int
from lightning_fastft.core.errors import DataError
from lightning_fastft.packing.packs import Packs, split_to_multiple

# The ranks of a micro-batch get packs of similar cost, chosen from this many micro-batches of the shuffled order. With
# log-normal lengths and 8 ranks the most expensive rank costs 1.05 x the mean with 32, 1.25 x with 8, and 2.3 x without
# balancing (checked in tests/packing/test_step_plan.py).
BALANCE_POOL_MICRO_BATCHES = 32
GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)


class StepPlan:
    """Assign packs to ranks and micro-batches as a pure function of the arguments.

    The position of a run is therefore one integer. Packs are shuffled by seed and epoch. The ranks of a micro-batch get
    packs of similar attention cost (sum of squared document lengths). Within an accumulation window the rank with the
    lowest cost so far gets the most expensive pack. Every document is trained once per epoch.

    Args:
        packs: All packs; split here to fill whole windows (see ``num_extra_packs``).
        length_N: Tokens of each document.
        num_labelled_N: Trained labels of each document, without the first token.
        seed: Seed of the shuffle.
        world_size: Number of data-parallel ranks.
        accumulate: Micro-batches per optimizer step on each rank.
        limit: As ``Trainer(limit_train_batches=...)``: a number of micro-batches, or a share of the epoch; None for
            all.
        shuffle: False keeps the order of the packs (predictions).

    Example:
        >>> from lightning_fastft.packing.packs import pack_best_fit_decreasing
        >>> length_N = np.array([4, 4, 2, 2])
        >>> packs = pack_best_fit_decreasing(length_N, max_tokens=4)
        >>> plan = StepPlan(packs, length_N=length_N, num_labelled_N=length_N - 1, seed=0, world_size=2, accumulate=1)
        >>> plan.num_micro_batches, plan.num_extra_packs
        (2, 1)
    """

    def __init__(
        self,
        packs: Packs,
        *,
        length_N: np.ndarray,
        num_labelled_N: np.ndarray,
        seed: int,
        world_size: int,
        accumulate: int,
        limit: float | None = None,
        shuffle: bool = True,
    ) -> None:
        self.seed = check_int("seed", seed, low=0)
        self.world_size = check_int("world_size", world_size, low=1)
        self.accumulate = check_int("accumulate", accumulate, low=1)
        self.packs = split_to_multiple(packs, length_N, multiple=world_size * accumulate)
        self.num_extra_packs = len(self.packs) - len(packs)
        self.shuffle = shuffle
        self.num_uncut_micro_batches = len(self.packs) // world_size
        self.num_micro_batches = _cut(self.num_uncut_micro_batches, limit=limit)
        self.cost_P = self.packs.sum_per_pack(length_N * length_N)
        self.num_labelled_P = self.packs.sum_per_pack(num_labelled_N)
        self._rests: dict[int, StepPlan] = {}

    def continue_epoch(self, epoch: int, rest: StepPlan) -> int:
        """Let an epoch end with the packs of another plan: what a run with other sizes has left of it.

        Returns:
            The micro-batch of the epoch at which the rest begins; those before it are empty.

        Raises:
            DataError: The rest has more micro-batches than the epoch.
        """
        begin = self.num_micro_batches - rest.num_micro_batches
        if begin < 0:
            raise DataError(
                f"{rest.num_micro_batches} micro-batches are left of an epoch of {self.num_micro_batches}: resume with "
                "the sizes of the checkpoint up to the end of the epoch."
            )
        self._rests[epoch] = rest
        return begin

    def epoch(self, epoch: int) -> EpochPlan:
        """Return the plan of one epoch; the same arguments give the same plan on every rank and in every process."""
        check_int("epoch", epoch, low=0)
        if epoch in self._rests:
            own = self._rests[epoch].epoch(epoch)
            num_before = self.num_micro_batches - len(own)
            return EpochPlan(
                packs=own.packs,
                pack_MR=np.pad(own.pack_MR, ((num_before, 0), (0, 0))),
                num_items_M=np.pad(own.num_items_M, (num_before, 0), constant_values=1.0),
            )
        pack_MR = self._rank_balanced_packs(epoch)[: self.num_micro_batches]
        num_items_M = window_items(
            self.num_labelled_P[pack_MR].sum(axis=1), accumulate=self.accumulate, world_size=self.world_size
        )
        return EpochPlan(packs=self.packs, pack_MR=pack_MR, num_items_M=num_items_M)

    def _rank_balanced_packs(self, epoch: int) -> np.ndarray:
        num_packs = len(self.packs)
        if not self.shuffle:
            return np.arange(num_packs).reshape(-1, self.world_size)
        order_P = np.argsort(
            mix_bits(np.arange(num_packs, dtype=np.uint64), seed=self.seed, stream=epoch), kind="stable"
        )
        if self.world_size == 1:
            return order_P[:, None]
        pool = self.world_size * self.accumulate * -(-BALANCE_POOL_MICRO_BATCHES // self.accumulate)
        pools = [self._alike_groups(order_P[begin : begin + pool], salt=epoch) for begin in range(0, num_packs, pool)]
        pack_MR = np.concatenate(pools)
        for begin in range(0, len(pack_MR), self.accumulate):
            self._level_window(pack_MR[begin : begin + self.accumulate])
        return pack_MR

    def _alike_groups(self, pack_P: np.ndarray, *, salt: int) -> np.ndarray:
        """Return the pool in groups of one pack per rank with similar costs, in shuffled order."""
        group_GR = pack_P[np.argsort(-self.cost_P[pack_P], kind="stable")].reshape(-1, self.world_size)
        return group_GR[
            np.argsort(mix_bits(group_GR[:, 0].astype(np.uint64), seed=self.seed, stream=salt), kind="stable")
        ]

    def _level_window(self, pack_AR: np.ndarray) -> None:
        """Reorder each micro-batch in place, so that the rank with the lowest load gets the most expensive pack."""
        load_R = np.zeros(self.world_size, dtype=np.int64)
        for pack_R in pack_AR:
            by_cost_R = pack_R[np.argsort(-self.cost_P[pack_R], kind="stable")]
            pack_R[np.argsort(load_R, kind="stable")] = by_cost_R
            load_R += self.cost_P[pack_R]


class EpochPlan:
    """Hold the micro-batches of one epoch: ``documents(rank, micro_batch)`` and ``num_items_M[micro_batch]``.

    Args:
        packs: The packs that pack_MR indexes.
        pack_MR: Pack index of each micro-batch and rank, int64.
        num_items_M: Divisor of the summed loss of each micro-batch: labelled tokens of its window / (accumulate x
            ranks), above 0.
    """

    def __init__(self, *, packs: Packs, pack_MR: np.ndarray, num_items_M: np.ndarray) -> None:
        self.packs = packs
        self.pack_MR = pack_MR
        self.num_items_M = num_items_M

    def __len__(self) -> int:
        return len(self.pack_MR)

    def documents(self, *, rank: int, micro_batch: int) -> np.ndarray:
        """Return the document numbers of a rank's pack; empty for a pack of padding only."""
        return self.packs[int(self.pack_MR[micro_batch, rank])]

    def trained(self, *, num_micro_batches: int) -> np.ndarray:
        """Return the document numbers of the first micro-batches on all ranks."""
        found = [self.packs[int(pack)] for pack in self.pack_MR[:num_micro_batches].reshape(-1)]
        return np.concatenate([np.zeros(0, dtype=np.int64), *found])


def mix_bits(number_N: np.ndarray, *, seed: int, stream: int) -> np.ndarray:
    """Return one hashed 64-bit number per entry, the same on every platform and NumPy version.

    NumPy generators do not guarantee the same stream across versions.

    Source:
        The finaliser of SplitMix64, DOI 10.1145/2714064.2660195.
    """
    state = np.zeros(1, dtype=np.uint64)
    for part in (seed, stream):
        state = _finalise(state + np.uint64(part & 0xFFFFFFFFFFFFFFFF) + GOLDEN_GAMMA)
    return _finalise(number_N.astype(np.uint64) * GOLDEN_GAMMA + state)


def _finalise(value: np.ndarray) -> np.ndarray:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _cut(num_micro_batches: int, *, limit: float | None) -> int:
    """Apply the limit as Lightning does, with at least one micro-batch; the Trainer itself rejects a limit of 0."""
    if limit is None:
        return num_micro_batches
    return max(1, min(num_micro_batches, limit) if isinstance(limit, int) else int(num_micro_batches * limit))


def window_items(num_labelled_M: np.ndarray, *, accumulate: int, world_size: int) -> np.ndarray:
    """Return labelled tokens of each micro-batch's accumulation window / (accumulate x ranks), float64; 1 for a window
    without labels.
    """
    window_M = np.arange(len(num_labelled_M)) // accumulate
    total_M = np.bincount(window_M, weights=num_labelled_M)[window_M]
    return np.where(total_M > 0, total_M / (accumulate * world_size), 1.0)
