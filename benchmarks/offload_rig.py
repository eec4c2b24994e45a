"""Train one model with random weights for some steps under several activation policies, each from the same adapters.

A run is a fresh Trainer with FastFTStrategy on the same FineTuner: warm-up, timed steps, then steps that are profiled
one by one. Its losses and the norm of its first gradients are recorded, so that runs are compared before their times
are.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from benchmarks.ruler.arms.ours import collate_pack, make_trainer, optimizer_factory
from benchmarks.ruler.cases import LEARNING_RATE, LONG_STEP_MS, NUM_LONG_STEPS, case_failures, drop_frames, versions
from benchmarks.ruler.copies import CopyProfile
from benchmarks.ruler.judge import trainable_adapters
from benchmarks.ruler.liger_layers import install_liger_layers
from benchmarks.ruler.measure import StepClock, peak_memory_gib, summarise_ms
from benchmarks.ruler.plans import CHECKED_STEP, check_plan, describe_plan, least_warmup, parse_mode
from benchmarks.ruler.workloads import Pack, Workload, lora_config, make_packs, read_lengths
from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.activations.probe import measure_machine
from lightning_fastft.activations.stack import SegmentStack
from lightning_fastft.activations.streams import CudaCopyStreams
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.hf.families import decoder_layers, find_causal_models
from lightning_fastft.planner.step import SegmentPlan, StepCost, uniform_plan
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.fine_tuner import FineTuner

MOST_PACKS = 24
# Fewest timed steps of a measurement; a run for which the budget has no time for them is not started.
LEAST_STEPS = 3
# Losses of the same step differ by the order of sums in the backward of attention, which varies from run to run.
LOSS_TOLERANCE = 1e-3

# Segments with all tensors on the host are spaced so that their copies overlap with the compute of the segments
# between them, with this margin.
SPACING_MARGIN = 1.25
FULL_HOST_PLAN = "full tensors on the host"


@dataclass(frozen=True)
class Run:
    """One run.

    Args:
        mode: Mode as in the ruler: "recompute", "offload", "offload1", "auto=14.5". num_tokens: Tokens of a pack.
        num_steps: Timed steps; fewer if a step exceeds 3 s or the budget ends. num_warmup: Steps before them.
        num_profiles: Steps profiled after them. delay_ms: Sleep of the host before each decoder layer. is_serial:
        Whether to copy on the compute stream, as a control. plan: FULL_HOST_PLAN replaces the plan of "auto"; empty for
        none. checks_plan: Whether gradients under the plan of "auto" are compared with those of recompute; a capped
        device may
            lack the memory.
    """

    mode: str
    num_tokens: int
    num_steps: int = 30
    num_warmup: int = 3
    num_profiles: int = 1
    delay_ms: float = 0.0
    is_serial: bool = False
    plan: str = ""
    checks_plan: bool = True

    @property
    def title(self) -> str:
        """Name in tables."""
        marks = [
            self.plan,
            f"{self.delay_ms:g} ms late" if self.delay_ms else "",
            "one stream" if self.is_serial else "",
        ]
        return " ".join(["auto" if self.plan else self.mode, *filter(None, marks)])


class Rig:
    """A FineTuner that stays on the device between runs.

    Args:
        workload: Model, quantisation and LoRA; packs are cut to the length of each run.
        is_cuda: Whether steps run on a GPU.
        optimizer: "adamw_fused" or "adamw_8bit".
        wants_liger: Whether to use Liger's norms and SwiGLU.
    """

    def __init__(
        self, workload: Workload, *, is_cuda: bool, optimizer: str = "adamw_fused", wants_liger: bool = False
    ) -> None:
        self.workload = workload
        self.is_cuda = is_cuda
        self._wants_liger = wants_liger
        torch.manual_seed(0)
        lora = lora_config(workload)
        # Both factors are nonzero, so that every adapter has a gradient from the first step on.
        lora.init_lora_weights = False
        self.tuner = FineTuner(
            {"model_type": workload.model_type, **workload.model_config},
            init="random",
            quantization=workload.quantization,
            lora=lora,
            dtype="bfloat16" if is_cuda else "float32",
            optimizer=optimizer_factory(optimizer, is_cuda=is_cuda),
            learning_rate=LEARNING_RATE,
            scheduler="constant",
            warmup_share=0.0,
        )
        # Lightning moves the module to the host when a fit ends; the next run needs it on the device.
        self.tuner.cpu = lambda: self.tuner  # type: ignore[method-assign]
        self._adapter: dict[str, torch.Tensor] = {}

    def measure(self, run: Run, *, deadline: float = float("inf")) -> dict[str, Any]:
        """Train under one policy and return the record; a failure is a record too, with a reason.

        Args:
            run: The run to measure.
            deadline: time.monotonic() after which no timed step should run.
        """
        run = replace(run, num_warmup=max(run.num_warmup, least_warmup(run.mode)))
        record: dict[str, Any] = {
            "workload": self.workload.name,
            **vars(run),
            "title": run.title,
            "versions": versions(),
            "reason": "",
        }
        if self.is_cuda:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        begin = time.monotonic()
        try:
            self._fit(run, record, deadline=deadline)
            if "summary" not in record:
                record["reason"] = "it ended before a step was timed"
        except case_failures() as error:
            record["reason"] = f"{type(error).__name__}: {str(error)[:500]}"
            drop_frames(error)
        self.tuner.zero_grad(set_to_none=True)
        record["seconds"] = time.monotonic() - begin
        return record

    def close(self) -> None:
        """Remove the model from the device; the rig cannot be used afterwards."""
        del self.tuner
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()

    def packs(self, num_tokens: int) -> list[Pack]:
        """Return packs of that length, of the stored list of documents."""
        num_all = sum(read_lengths()["lengths"]) // self.workload.length_divisor
        num_packs = max(1, min(MOST_PACKS, num_all * 9 // 10 // num_tokens))
        return make_packs(replace(self.workload, max_tokens=num_tokens, num_packs=num_packs))

    def _fit(self, run: Run, record: dict[str, Any], *, deadline: float) -> None:
        mode = parse_mode(run.mode)
        checkpointing = mode.checkpointing
        follow = RunCallback(run, record, rig=self, checkpointing=checkpointing, deadline=deadline)
        trainer = make_trainer(
            FastFTStrategy(activations=checkpointing), follow, max_steps=follow.num_total, is_cuda=self.is_cuda
        )
        trainer.callbacks.extend(mode.callbacks())
        packs = self.packs(run.num_tokens)
        rows = [packs[step % len(packs)] for step in range(follow.num_total)]
        loader = torch.utils.data.DataLoader(rows, batch_size=None, collate_fn=collate_pack, pin_memory=self.is_cuda)
        try:
            trainer.fit(self.tuner, train_dataloaders=loader)
        finally:
            follow.patcher.undo()
        follow.finish()

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the initial values of the adapters."""
        adapters = trainable_adapters(self.tuner.model)
        if not self._adapter:
            self._adapter = {name: parameter.detach().cpu().clone() for name, parameter in adapters.items()}
        for name, parameter in adapters.items():
            parameter.copy_(self._adapter[name])
        if self.tuner.low_precision_adapters is not None:
            self.tuner.low_precision_adapters.refresh()

    def layers(self) -> list[torch.nn.Module]:
        """Return the decoder layers."""
        ((_, model),) = find_causal_models(self.tuner.model)
        return decoder_layers(model)

    def install_liger(self, patcher: ModelPatcher) -> None:
        """Swap in Liger's layers if requested."""
        if self._wants_liger:
            install_liger_layers(self.tuner.model, patcher)


class SerialCopyStreams(CudaCopyStreams):
    """Copy on the compute stream, without overlap."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.out_stream = self.in_stream = torch.cuda.current_stream(device)


class RunCallback(Callback):
    """Record one run step by step.

    Args:
        run: The run to measure.
        record: Takes the results.
        rig: The rig of the run.
        checkpointing: The plugin of the strategy.
        deadline: time.monotonic() after which no timed step should run.
    """

    def __init__(
        self, run: Run, record: dict[str, Any], *, rig: Rig, checkpointing: OffloadCheckpointing, deadline: float
    ) -> None:
        self.patcher = ModelPatcher()
        self._run, self._record, self._rig, self._checkpointing = run, record, rig, checkpointing
        self._deadline = deadline
        self._clock = StepClock(is_cuda=rig.is_cuda)
        self._backward = StepClock(is_cuda=rig.is_cuda)
        self._profile = CopyProfile(is_cuda=rig.is_cuda)
        self._num_timed = run.num_steps
        self._step = 0
        self._losses: list[torch.Tensor] = []
        self._norms: torch.Tensor | None = None

    @property
    def num_total(self) -> int:
        """Maximum number of steps of this run."""
        return self._run.num_warmup + self._run.num_steps + self._run.num_profiles

    @property
    def _num_before_profiles(self) -> int:
        return self._run.num_warmup + self._num_timed

    def on_train_start(self, trainer: Trainer, pl_module: FineTuner) -> None:
        """Load adapters and set up layers and delays; record the time of loading."""
        if self._rig.is_cuda:
            self._record["peak_gib_load"] = peak_memory_gib(is_cuda=True)
            torch.cuda.reset_peak_memory_stats()
        self._rig.install_liger(self.patcher)
        self._rig.restore()
        for stack in self._checkpointing.stacks if self._run.is_serial else ():
            stack.executor.make_copy_streams = SerialCopyStreams
        if self._run.delay_ms:
            for layer in self._rig.layers():
                self.patcher.add_undo(layer.register_forward_pre_hook(self._delay).remove)

    def on_train_batch_start(self, trainer: Trainer, pl_module: FineTuner, batch: Any, batch_idx: int) -> None:
        """Switch to the requested plan once the measured one exists; start to profile after the timed steps."""
        if (
            self._step == CHECKED_STEP
            and self._checkpointing.stacks
            and self._checkpointing.stacks[-1].plan is not None
            and self._run.checks_plan
        ):
            stack = self._checkpointing.stacks[-1]
            if self._run.plan:
                stack.follow(full_host_plan(stack), device=pl_module.device, cost=stack.cost)
            self._record["plan_check"] = check_plan(pl_module, batch, self._checkpointing, is_cuda=self._rig.is_cuda)
        if self._step >= self._num_before_profiles:
            self._profile.start()

    def on_before_backward(self, trainer: Trainer, pl_module: FineTuner, loss: torch.Tensor) -> None:
        """Store the loss, and mark the start of the backward."""
        self._losses.append(loss.detach())
        self._backward.mark()

    def on_after_backward(self, trainer: Trainer, pl_module: FineTuner) -> None:
        """Mark the end of the backward."""
        self._backward.mark()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: FineTuner, optimizer: Any) -> None:
        """Store the norms of the first gradients."""
        if self._step == 0:
            gradients = [parameter.grad for parameter in pl_module.parameters() if parameter.requires_grad]
            missing = sum(gradient is None for gradient in gradients)
            if missing:
                raise ValueError(f"{missing} of {len(gradients)} trained tensors have no gradient.")
            self._norms = torch.stack(torch._foreach_norm(gradients))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: FineTuner, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the end of a step."""
        self._clock.mark()
        if self._step >= self._num_before_profiles:
            use = self._profile.stop()
            self._record.setdefault("copies", []).extend([] if use is None else [use._asdict()])
        self._step += 1
        if self._step == self._run.num_warmup:
            self._begin_timing()
        if self._step == self._num_before_profiles:
            self._end_timing()
        if self._step >= self._num_before_profiles + self._run.num_profiles:
            trainer.should_stop = True

    def finish(self) -> None:
        """Write the values stored on the device; refuse gradients that are zero or not finite."""
        if self._norms is None:
            return
        norms = self._norms.float().tolist()
        broken = sum(not 0 < norm < float("inf") for norm in norms)
        if broken:
            raise ValueError(f"{broken} of {len(norms)} gradients of the first step are zero or not finite.")
        self._record["gradient_norm"] = sum(norm * norm for norm in norms) ** 0.5
        self._record["losses"] = torch.stack(self._losses).float().tolist()

    def _delay(self, *_: Any) -> None:
        # Not while a plan is measured, which would then be one for a slow device.
        if self._step >= self._run.num_warmup - 1:
            time.sleep(self._run.delay_ms / 1e3)

    def _begin_timing(self) -> None:
        warmup_ms = self._clock.read_ms()
        self._record["warmup_ms"] = warmup_ms
        step_ms = warmup_ms[-1] if warmup_ms else 0.0
        if step_ms > LONG_STEP_MS:
            self._num_timed = min(self._num_timed, NUM_LONG_STEPS)
        left_ms = (self._deadline - time.monotonic()) * 1e3
        if step_ms and self._num_timed * step_ms > left_ms:
            self._num_timed = min(self._num_timed, max(LEAST_STEPS, int(left_ms / step_ms)))
        self._clock, self._backward = StepClock(is_cuda=self._rig.is_cuda), StepClock(is_cuda=self._rig.is_cuda)
        if self._rig.is_cuda:
            self._record["peak_gib_warmup"] = peak_memory_gib(is_cuda=True)
            torch.cuda.reset_peak_memory_stats()
        self._clock.mark()

    def _end_timing(self) -> None:
        step_ms = self._clock.read_ms()
        # Marks come in pairs, before and after a backward; every second interval is one.
        backward_ms = self._backward.read_ms()[::2]
        summary = summarise_ms(step_ms)
        self._record.update(
            ms=step_ms,
            summary=summary,
            backward_ms=summarise_ms(backward_ms),
            peak_gib=peak_memory_gib(is_cuda=self._rig.is_cuda),
            tokens_per_s=self._run.num_tokens / summary["median"] * 1e3,
            num_layers=len(self._rig.layers()),
            description=describe_plan(self._checkpointing),
        )


def full_host_plan(stack: SegmentStack) -> list[SegmentPlan]:
    """Return a plan with the input and all values of every n-th segment on the host, so that their copies overlap with
    the other segments.
    """
    assert stack.cost is not None
    machine = measure_machine(
        torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    )
    spacing = host_spacing(stack.cost, copy_bytes_per_s=min(machine.d2h_bytes_per_s, machine.h2d_bytes_per_s))
    plan = list(uniform_plan(len(stack.segments), "recompute"))
    # The last ones stay on the device, because no forward is left for their copies to overlap with.
    for index in range(0, len(plan) - min(spacing, len(plan) - 1), spacing):
        values = tuple((value.name, "host") for value in stack.cost.segments[index].values)
        plan[index] = SegmentPlan(is_kept=False, input_place="host", values=values)  # type: ignore[arg-type]
    return plan


def host_spacing(cost: StepCost, *, copy_bytes_per_s: float) -> int:
    """Return n, if every n-th segment can have all its tensors on the host."""
    middle = cost.segments[len(cost.segments) // 2]
    num_bytes = middle.input_bytes + sum(value.num_bytes for value in middle.values)
    copy_ms = num_bytes / copy_bytes_per_s * 1e3
    return max(1, -int(-copy_ms * SPACING_MARGIN // max(middle.forward_ms, 1e-6)))


def disagreement(record: dict[str, Any], reference: dict[str, Any]) -> str:
    """Return the differences between a run and its reference run; empty if they agree.

    Args:
        record: A run.
        reference: A run on the same packs from the same weights.
    """
    pairs = list(zip(record["losses"], reference["losses"]))
    worst = max(abs(own - other) / abs(other) for own, other in pairs)
    if worst > LOSS_TOLERANCE:
        return (
            f"its losses differ from those of {reference['title']} by {worst:.2e} in {len(pairs)} steps, "
            f"{LOSS_TOLERANCE:g} is allowed"
        )
    apart = abs(record["gradient_norm"] / reference["gradient_norm"] - 1)
    if apart > LOSS_TOLERANCE:
        return (
            f"its first gradients have another norm than those of {reference['title']}: {apart:.2e} apart, "
            f"{LOSS_TOLERANCE:g} is allowed"
        )
    return ""


def exposed_ms(record: dict[str, Any]) -> float:
    """Return the median time that compute waited for copies in the profiled steps; NaN without profiled steps."""
    times = sorted(use["exposed_ms"] for use in record.get("copies", []))
    return times[len(times) // 2] if times else float("nan")
