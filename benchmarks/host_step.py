r"""Time the host in training steps: ``python -m benchmarks.host_step`` on any machine, without a GPU.

A decoder of 28 layers of tiny width with LoRA trains on a CPU through FineTuner, FastFTStrategy and Trainer, with fused
layers. Kernels, GEMMs and attention are replaced by stubs, so that only the work of the host is left: Python, autograd,
the allocation of outputs, small operators, and Triton's launches without the call of the driver.
Prints the CPU time of the forward, the backward and the optimizer (clipping included), and the calls of Python
functions in a step. A busy machine gives slower figures: compare the smallest ones.

    python -m benchmarks.host_step --modes keep recompute
    python -m benchmarks.host_step --profile 40

With a workload that ``benchmarks.train_step build`` has written, the steps run on a GPU: the script measures the time
between the ends of steps, and the host time of each part without syncs.

    python -m benchmarks.host_step --workload qwen3-0.6b-lora --root /dev/shm/fastft --modes keep+fused --profile 40
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import os
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# As in train_step: set before anything is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

import torch
from lightning.pytorch import Callback

from benchmarks.ruler.arms import ours
from benchmarks.ruler.judge import load_start
from benchmarks.ruler.plans import least_warmup, parse_mode
from benchmarks.ruler.workloads import WORKLOADS, WorkloadFiles
from lightning_fastft.packing.collate import PackedBatch
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.fine_tuner import FineTuner

PARTS = ("forward", "backward", "optimizer")
NUM_WARMUP, NUM_PROFILED = 4, 5
# Proportions of Qwen3-0.6B.
TINY = {
    "model_type": "qwen3", "vocab_size": 97, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 28,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 128,
    "tie_word_embeddings": True, "eos_token_id": 2,
}  # fmt: skip
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class _Driver:
    """The driver that Triton queries before a launch."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


class _Compiled:
    """A compiled kernel that Triton launches."""

    function, packed_metadata = 0, ()

    def __init__(self, run: Callable[..., None]) -> None:
        self.run = run

    def launch_metadata(self, *arguments: Any) -> None:
        """Return None: there are no launch hooks."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.run


class StubbedDevice:
    """Stubs for the device in this process: Triton's driver, GEMMs and attention. They stay until the process ends.

    Attributes:
        num_launches: Launches of Triton kernels.
    """

    def __init__(self) -> None:
        self.num_launches = 0

    def install_kernels(self) -> None:
        """Make operations choose Triton on a CPU, without launching kernels."""
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        import lightning_fastft.fused.install as install
        import lightning_fastft.kernels.attention.op as attention

        def count(*arguments: Any) -> None:
            self.num_launches += 1

        def compile_nothing(kernel: Any, key: str, signature: Any, device: int, *arguments: Any) -> _Compiled:
            compiled: _Compiled = kernel.device_caches[device][0].setdefault(key, _Compiled(count))
            return compiled

        driver.set_active(_Driver())
        JITFunction._do_compile = compile_nothing
        for name, module in list(sys.modules.items()):
            if name.startswith("lightning_fastft") and hasattr(module, "uses_triton"):
                module.uses_triton = _always_triton
        install.fuse_weight_buffers = functools.partial(install.fuse_weight_buffers, device_types=("cpu",))
        describe = attention.describe_need
        attention.describe_need = lambda *given, **named: describe(*given, **named)._replace(
            device_type="cuda", capability=(9, 0)
        )
        torch.ops.aten._flash_attention_forward = _attend_nothing
        torch.ops.aten._flash_attention_backward = lambda d_out, q, k, v, *rest, **named: (
            torch.empty_like(q), torch.empty_like(k), torch.empty_like(v),
        )  # fmt: skip

    def install_products(self) -> None:
        """Return uninitialised memory for every GEMM, after the first steps, which need finite numbers."""
        from lightning_fastft.fused import linear_gradients

        torch.mm = torch.Tensor.__matmul__ = _multiply_nothing
        torch.addmm = lambda summand, left, right, *, beta=1, alpha=1, out=None: _multiply_nothing(left, right, out=out)
        linear_gradients.wide_product = lambda left, right, *, dtype: left.new_empty(
            left.shape[0], right.shape[1], dtype=dtype
        )


def _always_triton(device: torch.device) -> bool:
    return True


def _multiply_nothing(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    return left.new_empty(left.shape[0], right.shape[1]) if out is None else out


def _attend_nothing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **named: Any) -> tuple[Any, ...]:
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    return torch.empty_like(q), lse, q.new_empty(2), q.new_empty(0)


class HostClock(Callback):
    """Time the parts of steps on the host, then profile some steps.

    Args:
        num_warmup: Steps that are not timed.
        num_steps: Timed steps.
        device: The stubbed device; None on a GPU.
        start: Values of the trained parameters; None to keep them.
    """

    def __init__(
        self, *, num_warmup: int, num_steps: int, device: StubbedDevice | None, start: dict[str, torch.Tensor] | None
    ) -> None:
        self.parts_ms: dict[str, list[float]] = {part: [] for part in PARTS}
        self.ends_s: list[float] = []
        self.num_calls = 0.0
        self.num_launches = 0
        self.profile = cProfile.Profile()
        self.num_total = num_warmup + num_steps + NUM_PROFILED
        self._num_warmup, self._num_steps, self._device, self._start = num_warmup, num_steps, device, start
        # Time of this thread, for a busy machine; on a GPU the backward runs in another thread.
        self._now = time.perf_counter if device is None else time.thread_time
        self._begin = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Load the ruler's adapters."""
        if self._start is not None:
            load_start(pl_module.model, self._start)
            if pl_module.low_precision_adapters is not None:
                pl_module.low_precision_adapters.refresh()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Start the clock, or the profile."""
        if batch_idx == 1 and self._device is not None:
            self._device.install_products()
        if batch_idx == self._num_warmup:
            self._note_end()
        if batch_idx == self._num_warmup + self._num_steps:
            # The backward runs in this thread, so that the profile has it.
            torch.autograd.set_multithreading_enabled(False)
            self.profile.enable()
        self.num_launches = 0 if self._device is None else self._device.num_launches
        self._begin = self._now()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        """Mark the end of the forward."""
        self._mark("forward")

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Mark the end of the backward."""
        self._mark("backward")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Mark the end of a step."""
        self._mark("optimizer")
        if self._device is not None:
            self.num_launches = self._device.num_launches - self.num_launches
        if batch_idx == self._num_warmup + self._num_steps - 1:
            self._note_end()
        if batch_idx == self.num_total - 1:
            self.profile.disable()
            torch.autograd.set_multithreading_enabled(True)

    def _note_end(self) -> None:
        """Record when the device has finished its work."""
        if self._device is None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.ends_s.append(time.perf_counter())

    def _mark(self, part: str) -> None:
        now = self._now()
        self.parts_ms[part].append((now - self._begin) * 1e3)
        self._begin = now

    def timed_ms(self, part: str) -> list[float]:
        """Return the times of one part in the timed steps."""
        return self.parts_ms[part][self._num_warmup : self._num_warmup + self._num_steps]


def make_tiny() -> tuple[FineTuner, list[PackedBatch]]:
    """Return a tuner of tiny layers, and a pack of two documents."""
    from peft import LoraConfig

    torch.manual_seed(0)
    lora = LoraConfig(r=16, lora_alpha=32, bias="none", task_type="CAUSAL_LM", target_modules=TARGETS)
    tuner = FineTuner(TINY, init="random", lora=lora, dtype="bfloat16", learning_rate=1e-4)
    ids = torch.arange(3, 35)
    return tuner, [ours.make_batch([(ids, ids), (ids, ids)])]


def time_mode(
    mode: str, *, files: WorkloadFiles | None, num_steps: int, device: StubbedDevice | None, is_cuda: bool
) -> HostClock:
    """Train some steps of a mode, and return the measurements of the host."""
    parsed = parse_mode(mode)
    if files is None:
        tuner, packs = make_tiny()
        num_warmup, start = NUM_WARMUP, None
    else:
        tuner = ours.make_tuner(files, optimizer="adamw_fused", is_cuda=is_cuda)
        packs = [ours.collate_pack(pack) for pack in files.read_packs()]
        num_warmup, start = max(NUM_WARMUP + 2, least_warmup(mode)), dict(files.read_trained())
    clock = HostClock(num_warmup=num_warmup, num_steps=num_steps, device=device, start=start)
    trainer = ours.make_trainer(
        FastFTStrategy(activations=parsed.checkpointing), clock, max_steps=clock.num_total, is_cuda=is_cuda
    )
    trainer.callbacks.extend(parsed.callbacks(is_cuda=is_cuda))
    rows = [packs[step % len(packs)] for step in range(clock.num_total)]
    trainer.fit(tuner, torch.utils.data.DataLoader(rows, batch_size=None, collate_fn=_same, pin_memory=is_cuda))
    return clock


def _same(batch: PackedBatch) -> PackedBatch:
    return batch


def render(mode: str, clock: HostClock) -> str:
    """Return the lines of one mode."""
    parts = {part: clock.timed_ms(part) for part in PARTS}
    whole = [sum(times) for times in zip(*parts.values(), strict=True)]
    stats = pstats.Stats(clock.profile)
    lines = [
        f"{mode}: host {min(whole):.1f} ms a step at least, median {statistics.median(whole):.1f} ms; "
        f"{stats.total_calls / NUM_PROFILED / 1000:.1f} thousand calls of functions"  # type: ignore[attr-defined]
        + (f", {clock.num_launches} launches of Triton kernels" if clock.num_launches else "")
    ]
    if clock.ends_s:
        elapsed_ms = (clock.ends_s[1] - clock.ends_s[0]) * 1e3
        lines.append(f"  step {elapsed_ms / len(whole):.1f} ms on the device, mean of {len(whole)}")
    lines += [
        f"  {part:<10} {min(times):7.2f} ms, median {statistics.median(times):.2f}" for part, times in parts.items()
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Time the modes and print a table of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=["keep+fused"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--profile", type=int, default=0, help="number of functions to list, by own time and by time with callees"
    )
    parser.add_argument("--workload", choices=list(WORKLOADS), help="train the model of this workload on a GPU")
    parser.add_argument("--root", type=Path, help="folder of workloads built by benchmarks.train_step")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="device for --workload")
    options = parser.parse_args(arguments)
    files = device = None
    if options.workload is None:
        device = StubbedDevice()
        device.install_kernels()
    else:
        files = WorkloadFiles(options.root, WORKLOADS[options.workload])
    for mode in options.modes:
        is_cuda = device is None and options.device == "cuda"
        clock = time_mode(mode, files=files, num_steps=options.steps, device=device, is_cuda=is_cuda)
        print(render(mode, clock), flush=True)
        for order in ("tottime", "cumulative") if options.profile else ():
            pstats.Stats(clock.profile).strip_dirs().sort_stats(order).print_stats(options.profile)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
