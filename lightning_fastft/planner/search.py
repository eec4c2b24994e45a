"""Search for the fastest plan within a device and a host budget: families of plans, then single changes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate, combinations
from typing import Literal, NamedTuple

from lightning_fastft.planner.prediction import StepModel
from lightning_fastft.planner.step import Place, Plan, SegmentCost, SegmentPlan, ValueCost

UNLIMITED_BYTES = 2**62
# Numbers of kept segments tried first for every family, and number of families that are then refined.
_NUM_COARSE, _NUM_CLOSE = 6, 6
# Number of values of one segment of which every subset is tried for the host.
_NUM_HOST_CANDIDATES = 8
# Number of slot sizes tried if all segments offload alike, and if some fill the slot.
_NUM_SLOT_SIZES, _NUM_MIXED_SIZES = 7, 12
# Simulated segments in the search for single changes; limits it to about 0.2 s of one core.
_NUM_LOCAL_SEGMENTS = 30_000
# Densities closer than this count as equal, so that noise in measured times does not scatter the kept values.
_DENSITY_STEP = 0.05
_MS_PER_S = 1e3
# Times closer than this may be equal after rounding.
_MS_ROUNDING = 1e-5


class _Recipe(NamedTuple):
    """A family of plans: the order of kept segments, the size of a staging slot, and how much is offloaded.

    Segments offload up to usual_bytes each. Those before which the copy streams had enough idle time fill the slot. If
    is_hidden, a segment offloads no more than the copy streams can move while segments compute.
    """

    pattern: Literal["tail", "spread", "dense"]
    slot_bytes: int
    usual_bytes: int
    is_hidden: bool
    is_input_forced: bool


class _HostSet(NamedTuple):
    """Values of one segment that can be offloaded together."""

    num_bytes: int
    rebuild_ms: float
    names: frozenset[str]


class PlanSearch:
    """Search for the fastest plan within the budgets.

    Args:
        model: Simulates a step.
        vram_bytes: Peak device memory.
        host_bytes: Pinned host memory.
        is_streamed: Whether frozen weights are copied from the host.
    """

    def __init__(self, model: StepModel, vram_bytes: int, host_bytes: int, *, is_streamed: bool) -> None:
        self.model, self.vram_bytes, self.host_bytes, self.is_streamed = model, vram_bytes, host_bytes, is_streamed
        # Whether the host budget excluded a plan.
        self.is_short_of_host = False
        self._costs = model.cost.segments
        self._streams = [is_streamed and segment.weight_bytes > 0 for segment in self._costs]
        streamed_bytes = sum(segment.weight_bytes for segment, streams in zip(self._costs, self._streams) if streams)
        end_bytes = model.cost.ends.total if any(self._streams) else 0
        self._activation_bytes = host_bytes - streamed_bytes - end_bytes
        self._items = _items_by_density(self._costs)
        self._host_sets = {segment: _host_sets(segment) for segment in set(self._costs)}
        self._kept_by_density = _order_by_density(self._costs)
        self._times: dict[tuple[SegmentPlan, ...], float] = {}
        # The fastest plan that fits, and the plan with the smallest peak.
        self._best: Plan | None = None
        self._least: Plan | None = None

    @property
    def least_bytes(self) -> int:
        """Smallest peak of all tried plans."""
        return UNLIMITED_BYTES if self._least is None else self._least.prediction.peak_bytes

    def run(self) -> tuple[SegmentPlan, ...] | None:
        """Return the best plan, or None if no plan fits."""
        # Nothing is faster than no recompute and no copy.
        kept = self._try(tuple(SegmentPlan(True, "device", (), streams) for streams in self._streams))
        if kept is not None:
            return kept.segments
        if not self.model.machine.is_unified:
            # Usually the smallest peak; it offloads the last input too, which no family does.
            self._try(tuple(SegmentPlan(False, "host", (), streams) for streams in self._streams))
        improved = None
        for recipes in self._even_recipes(), self._mixed_recipes():
            self._try_families(recipes)
            if self._best is None or self._best is not improved:
                self._improve()
                improved = self._best
        if self._best is None:
            return None
        return tuple(_in_order(plan, cost) for plan, cost in zip(self._best.segments, self._costs))

    def _try_families(self, recipes: Iterator[_Recipe]) -> None:
        """Try plans of every family, and refine the fastest families."""
        step = max(1, len(self._costs) // _NUM_COARSE)
        tried = []
        for recipe in recipes:
            times = {num_kept: self._time_of(recipe, num_kept) for num_kept in range(0, len(self._costs) + 1, step)}
            num_kept = min(times, key=times.__getitem__)
            tried.append((times[num_kept], num_kept, recipe))
        tried.sort(key=lambda entry: entry[0])
        for time_ms, num_kept, recipe in tried[:_NUM_CLOSE]:
            self._refine(recipe, num_kept, time_ms, step)

    def _even_recipes(self) -> Iterator[_Recipe]:
        """Yield families in which all segments offload alike."""
        patterns: tuple[Literal["tail", "spread", "dense"], ...] = ("tail", "spread")
        if self._kept_by_density != sorted(self._kept_by_density, reverse=True):
            patterns = (*patterns, "dense")
        for slot_bytes in [0, *self._slot_sizes(_NUM_SLOT_SIZES)]:
            choices = ((True, True), (True, False), (False, True)) if slot_bytes else ((True, False),)
            for is_hidden, is_input_forced in choices:
                for pattern in patterns:
                    yield _Recipe(pattern, slot_bytes, slot_bytes, is_hidden, is_input_forced)

    def _mixed_recipes(self) -> Iterator[_Recipe]:
        """Yield families in which some segments fill the slot, and the others offload less."""
        for usual_bytes, slot_bytes in combinations(self._slot_sizes(_NUM_MIXED_SIZES), 2):
            yield _Recipe("tail", slot_bytes, usual_bytes, True, True)

    def _slot_sizes(self, most: int) -> list[int]:
        """Return sizes of a staging slot, smallest first; none for unified memory."""
        if self.model.machine.is_unified:
            return []
        inputs = max(segment.input_bytes for segment in self._costs)
        host_sets = [host_set for sets in self._host_sets.values() for host_set in sets]
        sizes = sorted({inputs + host_set.num_bytes for host_set in host_sets})
        return sorted({sizes[round(i * (len(sizes) - 1) / (most - 1))] for i in range(most)})

    def _refine(self, recipe: _Recipe, num_kept: int, time_ms: float, step: int) -> None:
        """Bisect around the best number of kept segments."""
        while step > 1:
            step = (step + 1) // 2
            for other in (num_kept - step, num_kept + step):
                other_ms = self._time_of(recipe, other) if 0 <= other <= len(self._costs) else float("inf")
                if other_ms < time_ms:
                    num_kept, time_ms = other, other_ms

    def _time_of(self, recipe: _Recipe, num_kept: int) -> float:
        """Return the time of the best plan of a family with this many kept segments; infinite if none fits."""
        kept = self._kept(recipe.pattern, num_kept)
        segments = self._with_host(recipe, kept)
        # Different recipes often give the same plan.
        time_ms = self._times.get(segments)
        if time_ms is None:
            time_ms = self._times[segments] = self._fill_device(segments)
        return time_ms

    def _kept(self, pattern: str, num_kept: int) -> frozenset[int]:
        last = len(self._costs) - 1
        if pattern == "spread":
            # Copies of other segments can then use the time of their kept neighbours.
            return frozenset(last - index * len(self._costs) // num_kept for index in range(num_kept))
        if pattern == "dense":
            return frozenset(self._kept_by_density[:num_kept])
        # Keep the last segments: the backward frees them first, before it recomputes earlier ones.
        return frozenset(range(last - num_kept + 1, last + 1))

    def _with_host(self, recipe: _Recipe, kept: frozenset[int]) -> tuple[SegmentPlan, ...]:
        """Offload as much as the copy streams can move: each segment adds its time to a credit of bytes."""
        segments = [SegmentPlan(number in kept, "device", (), streams) for number, streams in enumerate(self._streams)]
        movable = self._movable_inputs(recipe, kept)
        input_bytes = sum(self._costs[number].input_bytes for number in movable)
        # Inputs first; the values of all segments share the remaining host memory.
        value_share = (self._activation_bytes - input_bytes) / max(1, len(movable))
        credit = value_credit = 0.0
        # From last to first, so that a segment can use the time of the kept segments after it for its copies.
        for number in range(len(self._costs) - 1, -1, -1):
            segment = self._costs[number]
            hidden_bytes = self._hidden_bytes(number, recipe) if recipe.is_hidden else float("inf")
            credit = min(credit + hidden_bytes, float(recipe.slot_bytes))
            if number not in movable or (segment.input_bytes > credit and not recipe.is_input_forced):
                continue
            value_credit += value_share
            most = recipe.slot_bytes if credit >= recipe.slot_bytes else min(recipe.usual_bytes, credit)
            most -= segment.input_bytes
            chosen = _best_host_set(self._host_sets[segment], min(most, value_credit))
            self.is_short_of_host |= chosen.rebuild_ms < _best_host_set(self._host_sets[segment], most).rebuild_ms
            value_credit -= chosen.num_bytes
            credit = max(0.0, credit - segment.input_bytes - chosen.num_bytes)
            places: tuple[tuple[str, Place], ...] = tuple(
                (value.name, "host") for value in segment.values if value.name in chosen.names
            )
            segments[number] = SegmentPlan(False, "host", places, self._streams[number])
        return tuple(segments)

    def _movable_inputs(self, recipe: _Recipe, kept: frozenset[int]) -> set[int]:
        """Return the segments whose input may be offloaded, first to last, without the last one, whose backward
        follows at once.
        """
        movable = set()
        left_bytes = self._activation_bytes
        for number, segment in enumerate(self._costs[:-1]):
            if number in kept or not 0 < segment.input_bytes <= recipe.slot_bytes:
                continue
            if segment.input_bytes > left_bytes:
                self.is_short_of_host = True
                continue
            movable.add(number)
            left_bytes -= segment.input_bytes
        return movable

    def _hidden_bytes(self, number: int, recipe: _Recipe) -> float:
        """Return the bytes that both copy streams can move while this segment computes."""
        segment, machine = self._costs[number], self.model.machine
        usual = _best_host_set(self._host_sets[segment], recipe.usual_bytes - segment.input_bytes)
        backward_ms = segment.backward_ms + segment.recompute_ms - usual.rebuild_ms
        weight_bytes = segment.weight_bytes if self._streams[number] else 0
        out_bytes = segment.forward_ms * machine.d2h_bytes_per_s / _MS_PER_S
        return max(0.0, min(out_bytes, backward_ms * machine.h2d_bytes_per_s / _MS_PER_S - weight_bytes))

    def _fill_device(self, segments: tuple[SegmentPlan, ...]) -> float:
        """Store values on the device, most expensive per byte first, within the budget; return the time, or
        infinity if nothing fits.
        """
        trial = self._try(segments)
        if trial is None:
            return float("inf")
        items = [item for item in self._items if _is_rebuilt(segments[item[0]], item[1].name)]
        ends = list(accumulate((value.num_bytes for _, value in items), initial=0))
        num_held = 0
        while num_held < len(items):
            # A value adds at most its bytes to the peak; less if the backward of its segment is the peak.
            room = self.vram_bytes - trial.prediction.peak_bytes
            more = num_held
            while more < len(items) and ends[more + 1] - ends[num_held] <= room:
                more += 1
            following = self._try(_hold(segments, items[: max(more, num_held + 1)]))
            if following is None:
                break
            trial, num_held = following, max(more, num_held + 1)
        return trial.prediction.step_ms

    def _try(self, segments: tuple[SegmentPlan, ...], *, if_better: bool = False) -> Plan | None:
        """Return a plan with its simulated step if it fits, and remember it if it is the best.

        With ``if_better``, a plan that cannot be the best is not simulated, and None is returned.
        """
        footprint = self.model.footprint(segments)
        if footprint.host_bytes > self.host_bytes:
            return None
        peak_bytes = footprint.peak_bytes
        is_least, fits = peak_bytes < self.least_bytes, peak_bytes <= self.vram_bytes
        if not fits and not is_least:
            return None
        least_ms = footprint.compute_ms - _MS_ROUNDING
        if if_better and not is_least and self._best is not None and least_ms > self._best.prediction.step_ms:
            return None
        trial = Plan(segments, self.model.simulate(footprint))
        if is_least:
            self._least = trial
        if not fits:
            return None
        # Of equally fast plans, prefer the lower peak, then less host memory.
        if self._best is None or _rank(trial) < _rank(self._best):
            self._best = trial
        return trial

    def _improve(self) -> None:
        """Change one or two segments at a time while the best plan gets faster or, if none fits, its peak smaller."""
        num_left = max(1, _NUM_LOCAL_SEGMENTS // len(self._costs))
        current, seen = None, set()
        while current is not (self._best or self._least):
            current = self._best or self._least
            assert current is not None
            for segments in self._changes(current.segments):
                if segments in seen:
                    continue
                seen.add(segments)
                num_left -= 1
                if num_left < 0:
                    return
                self._try(segments, if_better=True)
                if current is not (self._best or self._least):
                    break

    def _changes(self, segments: tuple[SegmentPlan, ...]) -> Iterator[tuple[SegmentPlan, ...]]:
        """Yield plans that differ in one segment, then in two, where one segment frees memory for the other."""
        changes = [
            (number, plan)
            for number in range(len(segments) - 1, -1, -1)
            for plan in self._other_plans(number, segments[number])
        ]
        for number, plan in changes:
            yield (*segments[:number], plan, *segments[number + 1 :])
        for (first, first_plan), (second, second_plan) in combinations(changes, 2):
            if first != second:
                changed = list(segments)
                changed[first], changed[second] = first_plan, second_plan
                yield tuple(changed)

    def _other_plans(self, number: int, plan: SegmentPlan) -> Iterator[SegmentPlan]:
        """Return plans of one segment that differ in one step, most promising first."""
        if plan.is_kept:
            yield plan._replace(
                is_kept=False, values=tuple((value.name, "device") for value in self._costs[number].values)
            )
            yield plan._replace(is_kept=False)
            return
        yield SegmentPlan(True, "device", (), plan.is_streamed)
        held = dict(plan.values)
        places: tuple[Place | None, ...] = (
            ("device", None) if self.model.machine.is_unified else ("device", "host", None)
        )
        values = sorted(self._costs[number].values, key=lambda value: -value.rebuild_ms)
        for place in places:
            for value in values:
                if held.get(value.name) != place:
                    changed = {**held, value.name: place}
                    found = ((each.name, changed.get(each.name)) for each in self._costs[number].values)
                    yield plan._replace(values=tuple((name, at) for name, at in found if at is not None))
        if not self.model.machine.is_unified:
            yield plan._replace(input_place="host" if plan.input_place == "device" else "device")


def _rank(trial: Plan) -> tuple[float, int, int]:
    return (round(trial.prediction.step_ms, 6), trial.prediction.peak_bytes, trial.prediction.host_bytes)


def _is_rebuilt(plan: SegmentPlan, name: str) -> bool:
    return not plan.is_kept and all(name != held for held, _ in plan.values)


def _hold(segments: tuple[SegmentPlan, ...], items: list[tuple[int, ValueCost]]) -> tuple[SegmentPlan, ...]:
    """Return the plan with more values held on the device."""
    added: dict[int, list[tuple[str, Place]]] = {}
    for number, value in items:
        added.setdefault(number, []).append((value.name, "device"))
    return tuple(
        plan._replace(values=(*plan.values, *added[number])) if number in added else plan
        for number, plan in enumerate(segments)
    )


def _in_order(plan: SegmentPlan, cost: SegmentCost) -> SegmentPlan:
    places = dict(plan.values)
    return plan._replace(
        values=tuple((value.name, places[value.name]) for value in cost.values if value.name in places)
    )


def _items_by_density(costs: tuple[SegmentCost, ...]) -> list[tuple[int, ValueCost]]:
    """Return segment and cost of all values by recompute cost per byte, highest first; then later segments first."""
    found = [
        (_level(value.rebuild_ms, value.num_bytes), number, place, (number, value))
        for number, cost in enumerate(costs)
        for place, value in enumerate(cost.values)
        if value.rebuild_ms > 0
    ]
    return [item for *_, item in sorted(found, key=lambda entry: entry[:3], reverse=True)]


def _order_by_density(costs: tuple[SegmentCost, ...]) -> list[int]:
    """Return all segments by recompute cost per byte, highest first; among equals later ones first."""
    return sorted(
        range(len(costs)),
        key=lambda number: (_level(costs[number].recompute_ms, costs[number].saved_bytes), number),
        reverse=True,
    )


def _level(time_ms: float, num_bytes: int) -> float:
    """Return the density rounded to steps of a logarithmic scale."""
    if time_ms <= 0:
        return -math.inf
    return math.inf if num_bytes <= 0 else round(math.log(time_ms / num_bytes) / _DENSITY_STEP)


def _host_sets(cost: SegmentCost) -> list[_HostSet]:
    """Return the Pareto-optimal sets of values by bytes and time, smallest first, with the empty set."""
    candidates = sorted((value for value in cost.values if value.rebuild_ms > 0), key=lambda value: -value.rebuild_ms)[
        :_NUM_HOST_CANDIDATES
    ]
    sets = [_HostSet(0, 0.0, frozenset())]
    for value in candidates:
        sets += [
            _HostSet(one.num_bytes + value.num_bytes, one.rebuild_ms + value.rebuild_ms, one.names | {value.name})
            for one in sets
        ]
    sets.sort(key=lambda one: (one.num_bytes, -one.rebuild_ms, sorted(one.names)))
    best: list[_HostSet] = []
    for one in sets:
        if not best or one.rebuild_ms > best[-1].rebuild_ms + 1e-9:
            best.append(one)
    return best


def _best_host_set(sets: list[_HostSet], most_bytes: float) -> _HostSet:
    """Return the set that saves most time among those that fit, possibly the empty set."""
    return sets[max(1, bisect_right(sets, most_bytes, key=lambda one: one.num_bytes)) - 1]
