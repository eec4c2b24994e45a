"""Packs: which documents share a pack, by best-fit decreasing.

Axes: N documents, P packs (P1 = P + 1 offsets).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from lightning_fastft.core.checks import check_int
from lightning_fastft.core.errors import DataError

# Maximum number of refills while reducing the number of packs. It bounds the time to 0.3 s at 4,096 tokens if no better
# packing exists.
MAX_REFILLS = 10_000


class Packs:
    """Assign documents to packs: pack p holds ``document_N[start_P1[p]:start_P1[p + 1]]``.

    Args:
        document_N: Document numbers, pack by pack, int64.
        start_P1: Offset of each pack in document_N, ascending, int64, shape (P + 1,).
        max_tokens: Capacity of a pack in tokens.

    Example:
        >>> packs = pack_best_fit_decreasing(np.array([3, 5, 2]), max_tokens=5)
        >>> [packs[number].tolist() for number in range(len(packs))]
        [[1], [0, 2]]
    """

    def __init__(self, *, document_N: np.ndarray, start_P1: np.ndarray, max_tokens: int) -> None:
        self.document_N = document_N
        self.start_P1 = start_P1
        self.max_tokens = max_tokens

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


def join_packs(parts: Sequence[tuple[Packs, np.ndarray]]) -> Packs:
    """Return the packs of disjoint parts of a data set: each with its packs, and the numbers of its documents, int64.

    Example:
        >>> part = pack_best_fit_decreasing(np.array([3, 5, 2]), max_tokens=5)
        >>> joined = join_packs([(part, np.array([0, 1, 2])), (part, np.array([3, 4, 5]))])
        >>> [joined[number].tolist() for number in range(len(joined))]
        [[1], [0, 2], [4], [3, 5]]
    """
    members = [number_N[packs[pack]].tolist() for packs, number_N in parts for pack in range(len(packs))]
    return _as_packs(members, max_tokens=parts[0][0].max_tokens)


def split_to_multiple(packs: Packs, length_N: np.ndarray, *, multiple: int) -> Packs:
    """Return packs whose number is a multiple of ``multiple``, by splitting the packs with the most documents in two.

    Every document stays in exactly one pack. If every pack has at most one document, empty packs are added: they hold
    only padding, so that all ranks run the same number of micro-batches.
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
    return _as_packs(members, max_tokens=packs.max_tokens)


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


def _as_packs(members: list[list[int]], *, max_tokens: int) -> Packs:
    sizes = [len(documents) for documents in members]
    return Packs(
        document_N=np.fromiter(
            (document for documents in members for document in documents), dtype=np.int64, count=sum(sizes)
        ),
        start_P1=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        max_tokens=max_tokens,
    )
