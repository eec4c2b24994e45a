"""The planner: choose which activations to keep, offload or recompute for the fastest step within the budgets."""

from __future__ import annotations

from typing import Literal

from lightning_fastft.core.checks import check_choice, check_int
from lightning_fastft.core.errors import OptionError
from lightning_fastft.planner.prediction import StepModel, predict
from lightning_fastft.planner.search import UNLIMITED_BYTES, PlanSearch
from lightning_fastft.planner.step import Machine, Plan, Prediction, StepCost, check_segments, gib, uniform_plan

# Note a host budget if a larger one makes the step faster by this factor.
_NOTEWORTHY = 1.005
# If all weights fit, streaming must make the step faster by this factor. It needs host memory and PCIe bandwidth, and
# the prediction omits the copies of embedding rows (some ms).
_WORTH_STREAMING = 1.03


def make_plan(
    cost: StepCost,
    *,
    vram_budget_bytes: int,
    host_budget_bytes: int,
    machine: Machine,
    buffers: int = 2,
    weights: Literal["auto", "resident", "stream"] = "auto",
) -> Plan:
    """Return the plan with the shortest step that fits both budgets.

    Device memory holds the values that cost most to recompute per byte. Other tensors are offloaded, inputs first, as
    far as their copies hide under compute. The rest is recomputed. The search simulates families of plans (number and
    choice of kept segments, size of a staging slot, load of the copy streams), then single changes to the best plan.
    Families in which all segments offload alike come first, then those in which some offload more.

    Args:
        cost: Measured costs of the step.
        vram_budget_bytes: Peak device memory, with weights.
        host_budget_bytes: Pinned host memory; 0 keeps everything on the device.
        machine: Copy speeds.
        buffers: Number of staging slots on the device; 1 copies serially.
        weights: "resident" never streams frozen weights; "stream" streams those of every segment; "auto" streams if
            nothing else fits, or if the freed memory makes the step at least 3 % faster.

    Returns:
        The plan; its notes explain how a budget or the machine limited it.

    Raises:
        OptionError: No plan fits, or weights cannot be streamed; the message gives the smallest peak and how to lower
            it.

    Cost:
        Below 2 s of one core for 64 segments with 10 values each, twice that if weights can be streamed. No device
        work.

    Source:
        own
    """
    check_choice("weights", weights, ("auto", "resident", "stream"))
    check_int("vram_budget_bytes", vram_budget_bytes, low=0)
    check_int("host_budget_bytes", host_budget_bytes, low=0)
    check_segments(cost, uniform_plan(max(1, len(cost.segments)), "keep"))
    model = StepModel(cost, machine=machine, buffers=buffers)
    num_weight_bytes = _count_streamed_bytes(cost)
    if weights == "stream":
        check_streaming(cost, machine, host_budget_bytes)
    is_streamable = bool(num_weight_bytes) and not machine.is_unified and num_weight_bytes <= host_budget_bytes
    notes = []
    if machine.is_unified:
        notes.append(f"{machine.name} has unified memory: host and device share it, so nothing is offloaded.")
    search = PlanSearch(model, vram_budget_bytes, host_budget_bytes, is_streamed=weights == "stream")
    best = search.run()
    if best is None and weights == "auto" and is_streamable:
        resident_bytes = search.least_bytes
        search = PlanSearch(model, vram_budget_bytes, host_budget_bytes, is_streamed=True)
        best = search.run()
        notes.append(f"frozen weights are streamed: with resident weights the lowest peak is {gib(resident_bytes)}.")
    elif best is not None and weights == "auto" and is_streamable:
        resident_ms = model.run(best).step_ms
        other = PlanSearch(model, vram_budget_bytes, host_budget_bytes, is_streamed=True)
        found = other.run() if resident_ms > _WORTH_STREAMING * cost.least_ms else None
        if found is not None and resident_ms > _WORTH_STREAMING * model.run(found).step_ms:
            search, best = other, found
            notes.append(f"frozen weights are streamed: with resident weights a step would take {resident_ms:.0f} ms.")
    wider = _with_all_the_host(search)
    if best is None:
        raise OptionError(_nothing_fits(search, wider, weights=weights, is_streamable=is_streamable))
    prediction = predict(cost, best, machine=machine, buffers=buffers)
    if wider is not None and prediction.step_ms > wider.step_ms * _NOTEWORTHY:
        notes.append(
            f"the host budget of {gib(host_budget_bytes)} limits the plan: with {gib(wider.host_bytes)} a step would "
            f"take {wider.step_ms:.0f} ms instead of {prediction.step_ms:.0f}."
        )
    return Plan(tuple(best), prediction, tuple(notes))


def plan_policy(
    cost: StepCost,
    policy: str,
    *,
    vram_budget_bytes: int,
    host_budget_bytes: int,
    machine: Machine,
    buffers: int = 2,
    weights: Literal["auto", "resident", "stream"] = "auto",
) -> Plan:
    """Return the plan of a policy that treats all layers alike; it does not choose, and streams weights only if asked.

    Inputs that the host has no room for stay on the device, as in a run.

    Args:
        cost: As in ``make_plan``.
        policy: "keep", "recompute" or "offload", as in ``uniform_plan``.
        vram_budget_bytes: Device memory.
        host_budget_bytes: Pinned host memory.
        machine: As in ``make_plan``.
        buffers: As in ``make_plan``.
        weights: As in ``make_plan``; "auto" does not stream.

    Raises:
        OptionError: The policy needs more device memory than there is, or weights cannot be streamed.

    Source:
        own
    """
    is_streamed = weights == "stream"
    left_bytes, notes = host_budget_bytes, []
    if is_streamed:
        check_streaming(cost, machine, host_budget_bytes)
        left_bytes -= _count_streamed_bytes(cost)
    num_hosted, num_inputs = left_bytes // max(1, cost.segments[0].input_bytes), len(cost.segments) - 1
    if policy == "offload" and num_hosted < num_inputs:
        notes.append(note_host_room(num_hosted, num_inputs))
    segments = tuple(
        segment._replace(is_streamed=is_streamed)
        for segment in uniform_plan(len(cost.segments), policy, num_hosted=num_hosted)
    )
    prediction = predict(cost, segments, machine=machine, buffers=buffers)
    if prediction.peak_bytes > vram_budget_bytes:
        raise OptionError(
            f"Policy {policy!r} needs {gib(prediction.peak_bytes)} of device memory, and there are "
            f"{gib(vram_budget_bytes)}. Use policy 'auto' or a smaller max_tokens."
        )
    return Plan(segments, prediction, tuple(notes))


def note_host_room(num_hosted: int, num_inputs: int) -> str:
    """Return the note on a host budget that is too small for policy "offload"."""
    return f"host_budget has room for {num_hosted} of {num_inputs} inputs"


def _count_streamed_bytes(cost: StepCost) -> int:
    """Return the bytes of the frozen weights that can be on the host, with those of the ends; 0 if no layer has any."""
    num_bytes = sum(segment.weight_bytes for segment in cost.segments)
    return num_bytes + cost.ends.total if num_bytes else 0


def check_streaming(cost: StepCost, machine: Machine, host_budget_bytes: int) -> None:
    """Refuse weights="stream" where frozen weights cannot be streamed or the host budget cannot hold them."""
    num_weight_bytes = _count_streamed_bytes(cost)
    if machine.is_unified:
        raise OptionError(
            f'{machine.name} has unified memory, where streamed weights save nothing; use weights="resident".'
        )
    if not num_weight_bytes:
        raise OptionError(
            'weights="stream" needs frozen weights, but no segment has any (full fine-tuning trains all weights); use '
            'weights="resident".'
        )
    if num_weight_bytes > host_budget_bytes:
        raise OptionError(
            f'weights="stream" needs {gib(num_weight_bytes)} of pinned host memory for frozen weights, and the host '
            f'budget is {gib(host_budget_bytes)}; raise host_budget, or use weights="resident".'
        )


def _with_all_the_host(search: PlanSearch) -> Prediction | None:
    """Return the best cost with unlimited host memory, if the host budget excluded a plan."""
    if not search.is_short_of_host:
        return None
    wider = PlanSearch(search.model, search.vram_bytes, UNLIMITED_BYTES, is_streamed=search.is_streamed)
    best = wider.run()
    return None if best is None else search.model.run(best)


def _nothing_fits(search: PlanSearch, wider: Prediction | None, *, weights: str, is_streamable: bool) -> str:
    # Memory that is taken at any length of a pack.
    base_bytes = 0 if search.is_streamed else search.model.cost.base_bytes
    is_base_too_large = base_bytes >= search.vram_bytes
    ways = [] if is_base_too_large else ["a smaller max_tokens"]
    if weights == "resident" and is_streamable:
        ways.append('weights="stream"')
    if wider is not None:
        ways.append(f"a host budget of {gib(wider.host_bytes)}")
    ways.append("a larger VRAM budget")
    base = f", {gib(base_bytes)} of it for weights, gradients and optimizer state" if is_base_too_large else ""
    return (
        f"No plan fits the VRAM budget of {gib(search.vram_bytes)}: the lowest possible peak is "
        f"{gib(search.least_bytes)}{' with streamed weights' if search.is_streamed else ''}{base}. "
        f"Use {', or '.join(part for part in (', '.join(ways[:-1]), ways[-1]) if part)}."
    )
