r"""Profile one of our training steps: kernels by name, number of launches, and idle time of the device.

    python -m benchmarks.train_step build --workload qwen3-0.6b-lora --root /dev/shm/fastft
    python -m benchmarks.step_profile --workload qwen3-0.6b-lora --root /dev/shm/fastft --out runs/profile \
        --modes recompute keep

Steps run through FineTuner, FastFTStrategy and Trainer, with BincountRouter if the model has experts and
FusedKernels in modes with +fused; warm-up first, then timed steps, then steps under PyTorch's profiler, whose kernels
are summed by name. Busy is the sum of kernel times, copies apart. A timed step is split at the Trainer's hooks: forward
with all work before it, backward, clip, and optimizer with all work after it. FusedAdamW (adamw_fused and
adamw_fused_8bit) clips in its own pass, so its clip is empty. Steps are not judged: for a comparison with other systems
use benchmarks.train_step or benchmarks.moe.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# As in train_step: set before anything is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

import torch
from lightning.pytorch import Callback

from benchmarks.ruler.arms import ours
from benchmarks.ruler.cases import OUR_OPTIMIZERS, drop_frames
from benchmarks.ruler.judge import load_start
from benchmarks.ruler.liger_layers import install_liger_layers
from benchmarks.ruler.measure import StepClock
from benchmarks.ruler.plans import least_warmup, parse_mode
from benchmarks.ruler.workloads import WORKLOADS, WorkloadFiles
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.strategies.single_device import FastFTStrategy

NUM_PROFILED = 2
# Each ends at a mark of the clock.
PHASES = ("forward", "backward", "clip", "optimizer")
_LONGEST_NAME = 96


class Kernels(NamedTuple):
    """All launches of one kernel in one step."""

    name: str
    num_launches: float
    total_ms: float


class Profile(NamedTuple):
    """One step of one mode.

    Args:
        mode: Mode on the command line.
        step_ms: Median of the timed steps, unprofiled.
        phases_ms: Median of each of PHASES in those steps.
        peak_gib: Peak of allocated memory in the timed steps.
        kernels: Kernels, longest first.
        copies_ms: Time of copies and fills, which run concurrently with kernels or between them.
    """

    mode: str
    step_ms: float
    phases_ms: dict[str, float]
    peak_gib: float
    kernels: list[Kernels]
    copies_ms: float

    @property
    def busy_ms(self) -> float:
        """Time of all kernels of a step."""
        return sum(kernel.total_ms for kernel in self.kernels)

    @property
    def num_launches(self) -> float:
        """Kernels launched in a step."""
        return sum(kernel.num_launches for kernel in self.kernels)


class _Profiler(Callback):
    """Warm up, time, profile, stop."""

    def __init__(
        self, *, start: Mapping[str, torch.Tensor], wants_liger: bool, num_warmup: int, num_steps: int, is_cuda: bool
    ) -> None:
        self.patcher = ModelPatcher()
        self.times_ms: list[float] = []
        self.phases_ms: dict[str, list[float]] = {}
        self.peak_gib = 0.0
        self.events: list[Any] = []
        self._start, self._wants_liger = start, wants_liger
        self._num_warmup, self._num_steps, self._is_cuda = num_warmup, num_steps, is_cuda
        self._clock = StepClock(is_cuda=is_cuda)
        self._is_timed = False
        activity = torch.profiler.ProfilerActivity
        self._profile = torch.profiler.profile(activities=[activity.CUDA] if is_cuda else [activity.CPU])

    @property
    def num_total(self) -> int:
        """Steps of the fit."""
        return self._num_warmup + self._num_steps + NUM_PROFILED

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Load the ruler's adapters or weights and swap layers of the mode."""
        if self._wants_liger:
            install_liger_layers(pl_module.model, self.patcher)
        load_start(pl_module.model, self._start)
        if pl_module.low_precision_adapters is not None:
            pl_module.low_precision_adapters.refresh()
        # Callbacks have no hook between clipping and the optimizer.
        clip = pl_module.configure_gradient_clipping

        def clip_and_mark(*arguments: Any, **options: Any) -> None:
            clip(*arguments, **options)
            self._mark()

        pl_module.configure_gradient_clipping = clip_and_mark

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Start to time or to profile."""
        if batch_idx == self._num_warmup:
            if self._is_cuda:
                torch.cuda.reset_peak_memory_stats()
            self._is_timed = True
            self._mark()
        if batch_idx == self._num_warmup + self._num_steps:
            self._is_timed = False
            marks_ms = self._clock.read_ms()
            self.phases_ms = {phase: marks_ms[place :: len(PHASES)] for place, phase in enumerate(PHASES)}
            self.times_ms = [sum(phases) for phases in zip(*self.phases_ms.values(), strict=True)]
            self.peak_gib = torch.cuda.max_memory_allocated() / 2**30 if self._is_cuda else 0.0
            self._profile.start()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        """Mark the end of the forward."""
        self._mark()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Mark the end of the backward."""
        self._mark()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Mark the end of a step; read the profile after the last one."""
        self._mark()
        if batch_idx == self.num_total - 1:
            if self._is_cuda:
                torch.cuda.synchronize()
            self._profile.stop()
            self.events = list(self._profile.key_averages())

    def _mark(self) -> None:
        if self._is_timed:
            self._clock.mark()


def profile_mode(
    tuner: Any, mode: str, *, files: WorkloadFiles, num_warmup: int, num_steps: int, is_cuda: bool
) -> Profile:
    """Train some steps of a mode and return the measurements of the last ones."""
    from lightning_fastft.callbacks.bincount_router import BincountRouter

    parsed = parse_mode(mode)
    packs = files.read_packs()
    profiler = _Profiler(
        start=files.read_trained(),
        wants_liger=parsed.wants_liger,
        num_warmup=max(num_warmup, least_warmup(mode)),
        num_steps=num_steps,
        is_cuda=is_cuda,
    )
    trainer = ours.make_trainer(
        FastFTStrategy(activations=parsed.checkpointing), profiler, max_steps=profiler.num_total, is_cuda=is_cuda
    )
    trainer.callbacks.extend(parsed.callbacks(is_cuda=is_cuda))
    if files.workload.num_experts:
        trainer.callbacks.append(BincountRouter())
    rows = [packs[step % len(packs)] for step in range(profiler.num_total)]
    loader = torch.utils.data.DataLoader(rows, batch_size=None, collate_fn=ours.collate_pack, pin_memory=is_cuda)
    try:
        trainer.fit(tuner, train_dataloaders=loader)
    finally:
        vars(tuner).pop("configure_gradient_clipping", None)
        profiler.patcher.undo()
        tuner.zero_grad(set_to_none=True)
    kernels, copies_ms = sum_events(profiler.events, num_steps=NUM_PROFILED, is_cuda=is_cuda)
    phases_ms = {phase: statistics.median(times) for phase, times in profiler.phases_ms.items()}
    return Profile(mode, statistics.median(profiler.times_ms), phases_ms, profiler.peak_gib, kernels, copies_ms)


def sum_events(events: Iterable[Any], *, num_steps: int, is_cuda: bool) -> tuple[list[Kernels], float]:
    """Return kernels by name with times of one step, longest first, and the time of copies and fills."""
    counts: dict[str, int] = defaultdict(int)
    times_us: dict[str, float] = defaultdict(float)
    copies_us = 0.0
    for event in events:
        time_us = event.self_device_time_total if is_cuda else event.self_cpu_time_total
        if time_us <= 0:
            continue
        if event.key.startswith(("Memcpy", "Memset")):
            copies_us += time_us
            continue
        name = short_name(event.key)
        counts[name] += event.count
        times_us[name] += time_us
    kernels = [Kernels(name, counts[name] / num_steps, times_us[name] / num_steps / 1000) for name in counts]
    return sorted(kernels, key=lambda kernel: -kernel.total_ms), copies_us / num_steps / 1000


def short_name(name: str) -> str:
    """Return a kernel's name without common parts.

    Example:
        >>> short_name("void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float> >(int, float)")
        'vectorized_elementwise_kernel<4, AddFunctor<float> >'
    """
    name = re.sub(r"\(anonymous namespace\)::", "", name).removeprefix("void ")
    name = re.sub(r"\((?:[^()]|\([^()]*\))*\)( const)?$", "", name)
    return re.sub(r"\bat::native::|\bat::", "", name)[:_LONGEST_NAME]


def render(profile: Profile, *, num_layers: int, num_shown: int) -> str:
    """Return the table of one mode."""
    lines = [
        f"{profile.mode}: step {profile.step_ms:.1f} ms, {profile.peak_gib:.1f} GiB; kernels {profile.busy_ms:.1f} ms "
        f"in {profile.num_launches:.0f} "
        f"launches ({profile.num_launches / num_layers:.1f} a layer), copies and fills {profile.copies_ms:.1f} ms",
        "  " + ", ".join(f"{phase} {time_ms:.1f} ms" for phase, time_ms in profile.phases_ms.items()),
    ]
    lines += [
        f"  {kernel.total_ms:8.2f} ms {kernel.total_ms / profile.busy_ms:5.1%} {kernel.num_launches:7.1f} x  "
        f"{kernel.name}"
        for kernel in profile.kernels[:num_shown]
    ]
    rest = profile.kernels[num_shown:]
    if rest:
        lines.append(
            f"  {sum(kernel.total_ms for kernel in rest):8.2f} ms       "
            f"{sum(kernel.num_launches for kernel in rest):7.1f} x  the rest"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", required=True, choices=list(WORKLOADS))
    parser.add_argument("--root", type=Path, required=True, help="folder of workloads built by benchmarks.train_step")
    parser.add_argument("--out", type=Path, required=True, help="folder for profile.txt")
    parser.add_argument("--modes", nargs="+", default=["recompute", "keep"])
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--optimizer", default="adamw_8bit", choices=OUR_OPTIMIZERS)
    parser.add_argument("--shown", type=int, default=40, help="kernels in the table")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args(arguments)
    files = WorkloadFiles(options.root, WORKLOADS[options.workload])
    if not files.is_built():
        print(
            f"{options.workload} is not built under {options.root}: run benchmarks.train_step build first.",
            file=sys.stderr,
        )
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    is_cuda = options.device == "cuda"
    tuner = ours.make_tuner(files, optimizer=options.optimizer, is_cuda=is_cuda)
    num_layers = files.workload.model_config["num_hidden_layers"]
    for mode in options.modes:
        try:
            step = profile_mode(
                tuner, mode, files=files, num_warmup=options.warmup, num_steps=options.steps, is_cuda=is_cuda
            )
        except torch.OutOfMemoryError as error:
            text = f"{mode}: {str(error)[:200]}"
            drop_frames(error)
        else:
            text = render(step, num_layers=num_layers, num_shown=options.shown)
        print(text, flush=True)
        with (options.out / "profile.txt").open("a", encoding="utf-8") as file:
            file.write(f"{options.workload}\n{text}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
