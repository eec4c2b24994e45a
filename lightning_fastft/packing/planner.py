"""Plan a run in integers: which documents share a pack, and which pack each rank trains in each micro-batch.

Axes: N documents, P packs (P1 = P + 1 offsets), M micro-batches of one rank in one epoch, R ranks.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from lightning_fastft.core.checks import check_int
from lightning_fastft.core.errors import DataError

# The ranks of a micro-batch get packs of similar cost, chosen from this many micro-batches of the shuffled order. With
# log-normal lengths and 8 ranks the most expensive rank costs 1.05 x the mean with 32, 1.25 x with 8, and 2.3 x without
# balancing (checked in tests/packing/test_planner.py).
BALANCE_POOL_MICRO_BATCHES = 32
# Maximum number of refills while reducing the number of packs. It bounds the time to 0.3 s at 4,096 tokens if no better
# packing exists.
MAX_REFILLS = 10_000
GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)


class Packs:
    """Assign documents to packs: pack p holds ``document_N[start_P1[p]:start_P1[p + 1]]``.

    Args:
        document_N: Document numbers, pack by pack, int64.
        start_P1: Offset of each pack in document_N, ascending, int64, shape (P + 1,).
        max_tokens: Capacity of a pack in tokens.
        num_split: Packs added to fill whole accumulation windows on all ranks.

    Example:
        >>> packs = pack_best_fit_decreasing(np.array([3, 5, 2]), max_tokens=5)
        >>> [packs[number].tolist() for number in range(len(packs))]
        [[1], [0, 2]]
    """

    def __init__(self, *, document_N: np.ndarray, start_P1: np.ndarray, max_tokens: int, num_split: int = 0) -> None:
        self.document_N = document_N
        self.start_P1 = start_P1
        self.max_tokens = max_tokens
        self.num_split = num_split

    def __len__(self) -> int:
        return len(self.start_P1) - 1

    def __getitem__(self, number: int) -> np.ndarray:
        return self.document_N[self.start_P1[number] : self.start_P1[number + 1]]

    def sum_per_pack(self, value_N: np.ndarray) -> np.ndarray:
        """Return the sum of value_N over the documents of each pack, int64, shape (P,)."""
        total_N1 = np.concatenate([[0], np.cumsum(value_N[self.document_N], dtype=np.int64)])
        return total_N1[self.start_P1[1:]] - total_N1[self.start_P1[:-1]]

    def fill(self, length_N: np.ndarray) -> float:
        """Return the share of the total capacity that documents occupy."""
        return float(length_N[self.document_N].sum() / (max(1, len(self)) * self.max_tokens))


def pack_best_fit_decreasing(length_N: np.ndarray, *, max_tokens: int) -> Packs:
    """Return packs that hold every document once, none longer than max_tokens.

    Documents are placed longest first, each into the fullest pack with enough room. If this needs more than
    ceil(tokens / max_tokens) packs, two packs are merged into one: their surplus is moved into packs with room, which
    are refilled by subset sum.

    Args:
        length_N: Tokens of each document, shape (N,), each between 1 and max_tokens.
        max_tokens: Capacity of a pack in tokens.

    Returns:
        Packs, ordered by their longest document, longest first.

    Raises:
        DataError: There is no document, one is empty, or one is longer than max_tokens.

    Cost:
        O(N log max_tokens) on the host: 0.1 s for 60,000 documents (benchmarks/packing.py), a few times that if packs
        are merged.

    Source:
        Best-fit decreasing: Johnson, 1973; for language models arXiv 2404.10830. Merging packs is own.

    Example:
        >>> len(pack_best_fit_decreasing(np.array([6, 5, 4, 4, 3, 2]), max_tokens=8))
        3
    """
    check_int("max_tokens", max_tokens, low=1)
    length_N = np.asarray(length_N, dtype=np.int64)
    if length_N.size == 0:
        raise DataError("There are no documents to pack.")
    if int(length_N.min()) < 1:
        raise DataError(
            f"Document {int(length_N.argmin())} has {int(length_N.min())} tokens. Every document needs at least one."
        )
    if int(length_N.max()) > max_tokens:
        raise DataError(
            f"Document {int(length_N.argmax())} has {int(length_N.max())} tokens, which exceeds "
            f"max_tokens={max_tokens}."
        )
    packs = _best_fit(length_N, max_tokens=max_tokens)
    _merge_packs(packs, length_N, max_tokens=max_tokens)
    return _as_packs(packs, max_tokens=max_tokens)


def split_to_multiple(packs: Packs, length_N: np.ndarray, *, multiple: int) -> Packs:
    """Return packs whose number is a multiple of ``multiple``, by splitting the packs with the most documents in two.

    Every document stays in exactly one pack. If every pack has at most one document, empty packs are added: they hold
    only padding, so that all ranks run the same number of micro-batches.

    Args:
        packs: The packs to split; not modified.
        length_N: Tokens of each document.
        multiple: Ranks times micro-batches per optimizer step.

    Returns:
        Packs; ``num_split`` counts the added ones.
    """
    check_int("multiple", multiple, low=1)
    num_missing = -len(packs) % multiple
    if num_missing == 0:
        return packs
    members: list[list[int]] = [packs[number].tolist() for number in range(len(packs))]
    largest = [(-len(documents), number) for number, documents in enumerate(members)]
    heapq.heapify(largest)
    for _ in range(num_missing):
        _, number = heapq.heappop(largest)
        first, second = _halves(members[number], length_N)
        members[number] = first
        members.append(second)
        heapq.heappush(largest, (-len(first), number))
        heapq.heappush(largest, (-len(second), len(members) - 1))
    return _as_packs(members, max_tokens=packs.max_tokens, num_split=packs.num_split + num_missing)


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
        shuffle: False keeps the order of the packs (validation).

    Example:
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
        check_int("seed", seed, low=0)
        check_int("world_size", world_size, low=1)
        check_int("accumulate", accumulate, low=1)
        self.packs = split_to_multiple(packs, length_N, multiple=world_size * accumulate)
        self.num_extra_packs = len(self.packs) - len(packs)
        self.seed = seed
        self.world_size = world_size
        self.accumulate = accumulate
        self.shuffle = shuffle
        self.num_uncut_micro_batches = len(self.packs) // world_size
        self.num_micro_batches = _cut(self.num_uncut_micro_batches, limit=limit)
        self.cost_P = self.packs.sum_per_pack(length_N * length_N)
        self.num_labelled_P = self.packs.sum_per_pack(num_labelled_N)
        self._rests: dict[int, StepPlan] = {}

    def continue_epoch(self, epoch: int, rest: StepPlan) -> int:
        """Let an epoch end with the packs of another plan: what a run with other sizes has left of it.

        Args:
            epoch: The epoch.
            rest: Plan of the documents that are left, for the same ranks and accumulation.

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
        num_items_M = _window_items(
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


def _window_items(num_labelled_M: np.ndarray, *, accumulate: int, world_size: int) -> np.ndarray:
    """Return labelled tokens of each micro-batch's window / (accumulate x ranks); 1 for a window without labels."""
    window_M = np.arange(len(num_labelled_M)) // accumulate
    total_M = np.bincount(window_M, weights=num_labelled_M)[window_M]
    return np.where(total_M > 0, total_M / (accumulate * world_size), 1.0)


def _best_fit(length_N: np.ndarray, *, max_tokens: int) -> list[list[int]]:
    """Pack by best-fit decreasing, with one stack of packs per free room and a sorted list of the rooms in use."""
    order_N = np.argsort(-length_N, kind="stable")
    shortest = int(length_N.min())
    packs: list[list[int]] = []
    rooms: list[int] = []
    waiting: dict[int, list[int]] = {}
    for document, length in zip(order_N.tolist(), length_N[order_N].tolist()):
        position = bisect_left(rooms, length)
        if position == len(rooms):
            pack, room = len(packs), max_tokens
            packs.append([])
        else:
            room = rooms[position]
            stack = waiting[room]
            pack = stack.pop()
            if not stack:
                del rooms[position], waiting[room]
        packs[pack].append(document)
        room -= length
        if room >= shortest:
            if room not in waiting:
                insort(rooms, room)
                waiting[room] = []
            waiting[room].append(pack)
    return packs


def _merge_packs(packs: list[list[int]], length_N: np.ndarray, *, max_tokens: int) -> None:
    """Merge two packs into one, in place, until the lower bound is reached or the free room is too scattered."""
    num_needed = -(-int(length_N.sum()) // max_tokens)
    refills_left = MAX_REFILLS
    while len(packs) > num_needed and refills_left > 0:
        rooms = [max_tokens - int(length_N[documents].sum()) for documents in packs]
        roomiest_first = sorted(range(len(packs)), key=rooms.__getitem__, reverse=True)
        emptiest = roomiest_first[0]
        # Best fit leaves packs of equal lengths, whose subset sums have gaps. Lengths of a varied pack fill the gaps.
        varied = max(roomiest_first[1:], key=lambda number: len(set(length_N[packs[number]].tolist())))
        surplus = packs[emptiest] + packs[varied]
        num_surplus = int(length_N[surplus].sum())
        refilled: dict[int, list[int]] = {}
        for number in roomiest_first[1:]:
            if num_surplus <= max_tokens or rooms[number] == 0 or refills_left == 0:
                break
            if number == varied:
                continue
            refills_left -= 1
            pool = packs[number] + surplus
            full, rest = _fullest_subset(pool, length_N[pool].tolist(), max_tokens=max_tokens)
            if int(length_N[rest].sum()) < num_surplus:
                refilled[number], surplus, num_surplus = full, rest, int(length_N[rest].sum())
        if num_surplus > max_tokens:
            return
        for number, documents in refilled.items():
            packs[number] = documents
        packs[varied] = surplus
        del packs[emptiest]


def _fullest_subset(pool: list[int], lengths: list[int], *, max_tokens: int) -> tuple[list[int], list[int]]:
    """Split the pool into the subset that fills a pack best and the rest, by subset sum on the bits of an integer."""
    inside = (1 << (max_tokens + 1)) - 1
    reachable = [1]
    for length in lengths:
        reachable.append((reachable[-1] | (reachable[-1] << length)) & inside)
    total = reachable[-1].bit_length() - 1
    chosen: list[int] = []
    rest: list[int] = []
    for number in range(len(pool) - 1, -1, -1):
        if reachable[number] >> total & 1:
            rest.append(pool[number])
        else:
            chosen.append(pool[number])
            total -= lengths[number]
    return chosen, rest


def _halves(documents: Sequence[int], length_N: np.ndarray) -> tuple[list[int], list[int]]:
    """Split documents into two sets with about equal token counts; the second is empty for a single document."""
    halves: tuple[list[int], list[int]] = ([], [])
    loads = [0, 0]
    for document in sorted(documents, key=lambda document: (-int(length_N[document]), document)):
        lighter = int(loads[1] < loads[0])
        halves[lighter].append(document)
        loads[lighter] += int(length_N[document])
    return halves


def _as_packs(members: list[list[int]], *, max_tokens: int, num_split: int = 0) -> Packs:
    sizes = [len(documents) for documents in members]
    return Packs(
        document_N=np.fromiter(
            (document for documents in members for document in documents), dtype=np.int64, count=sum(sizes)
        ),
        start_P1=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        max_tokens=max_tokens,
        num_split=num_split,
    )
