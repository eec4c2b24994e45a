r"""Time DoRA against LoRA on one model: fused, and through PEFT's own forward.

    python -m benchmarks.dora --workload qwen3-8b-lora --steps 30
    python -m benchmarks.dora --workload qwen3-8b-qlora --steps 30

The model has random weights; every arm trains it on the same packs of new data, through FineTuner and FastFTStrategy,
with adapters of the same values, B not zero. Arms: "lora" and "dora", both fused, and "peft", DoRA through PEFT's own
forward, on fewer steps. Losses of "dora" and "peft" must agree in every step that both ran. Steps end at CUDA events;
6 warm-up steps.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Callback

from benchmarks.ruler.arms.ours import collate_pack, make_trainer
from benchmarks.ruler.building import _condition
from benchmarks.ruler.measure import StepClock
from benchmarks.ruler.workloads import WORKLOADS, Workload, make_packs
from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.callbacks.fused_kernels import FusedKernels
from lightning_fastft.fused import row_factors
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.fine_tuner import FineTuner

NUM_WARMUP = 6
ARMS = ("lora", "dora", "peft")
# Largest relative difference of two losses in bf16; other adapters differ by far more.
LOSS_TOLERANCE = 5e-3


class Measure(Callback):
    """Fill B, and record the time of each step, the losses, and the memory of the timed steps."""

    def __init__(self, *, is_cuda: bool) -> None:
        self.is_cuda = is_cuda
        self.clock = StepClock(is_cuda=is_cuda)
        self.losses: list[torch.Tensor] = []
        self.record: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Fill B."""
        generator = torch.Generator(device=pl_module.device).manual_seed(3)
        with torch.no_grad():
            for name, parameter in pl_module.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0.0, 0.3 * parameter.shape[1] ** -0.5 * 0.05, generator=generator)
        if pl_module.low_precision_adapters is not None:
            pl_module.low_precision_adapters.refresh()
        self.record["table"] = [
            f"{status.name}: {status.state}, {status.reason}"
            for status in trainer.strategy.statuses()
            if status.name in ("fused layers", "low-precision adapters")
        ]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Mark the end of a step."""
        self.losses.append(outputs["loss"].detach())
        if batch_idx + 1 == min(NUM_WARMUP, trainer.max_steps - 1):
            if self.is_cuda:
                torch.cuda.reset_peak_memory_stats()
            self.clock = StepClock(is_cuda=self.is_cuda)
        self.clock.mark()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Read times, losses and memory, and time a refresh of the adapters."""
        times = self.clock.read_ms()
        self.record |= {"ms": statistics.median(times), "least_ms": min(times), "most_ms": max(times), "n": len(times)}
        if self.is_cuda:
            self.record["allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
            self.record["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        self.record["losses"] = torch.stack(self.losses).tolist()
        copies = pl_module.low_precision_adapters
        if copies is not None and self.is_cuda:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            copies.refresh()
            before.record()
            copies.refresh()
            after.record()
            torch.cuda.synchronize()
            self.record["refresh_ms"] = before.elapsed_time(after)


def make_base(workload: Workload, *, is_cuda: bool) -> Any:
    """Return the model with random weights, quantised if the workload is."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(workload.model_type, **workload.model_config)
    torch.manual_seed(0)
    with torch.device("cuda" if is_cuda else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if is_cuda else torch.float32)
    with torch.no_grad():
        _condition(model, tied=bool(workload.model_config["tie_word_embeddings"]))
    if workload.quantization == "nf4":
        quantise(model)
    return model


def quantise(model: Any) -> None:
    """Replace the linear layers of the decoder layers by bitsandbytes' NF4 ones."""
    import bitsandbytes

    for name, linear in list(model.model.layers.named_modules()):
        if type(linear) is not torch.nn.Linear:
            continue
        new = bitsandbytes.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=False, compute_dtype=linear.weight.dtype, quant_type="nf4",
            device="meta",
        )  # fmt: skip
        new.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
        new.weight = new.weight.to(linear.weight.device)
        new.quant_state = new.weight.quant_state
        model.model.layers.set_submodule(name, new)
    model.is_loaded_in_4bit, model.is_quantized = True, True


def run_arm(arm: str, base: Any, workload: Workload, *, num_steps: int, is_cuda: bool, mode: str) -> dict[str, Any]:
    """Train an arm on the base, and remove its adapters again."""
    lora = {
        "r": workload.lora_rank,
        "lora_alpha": workload.lora_alpha,
        "target_modules": list(workload.target_modules),
        "use_dora": arm != "lora",
    }
    torch.manual_seed(1)
    tuner = FineTuner(
        base, tokenizer=None, lora=lora, dtype="bfloat16" if is_cuda else "float32", learning_rate=1e-4,
        scheduler="constant", warmup_share=0.0,
    )  # fmt: skip
    tuner.cpu = lambda: tuner  # type: ignore[method-assign]
    measure = Measure(is_cuda=is_cuda)
    packs = make_packs(workload)
    rows = [packs[step % len(packs)] for step in range(num_steps)]
    loader = torch.utils.data.DataLoader(
        rows, batch_size=None, collate_fn=functools.partial(collate_pack, share=1.0), pin_memory=is_cuda
    )  # type: ignore[arg-type]
    strategy = FastFTStrategy(activations=OffloadCheckpointing(mode))
    trainer = make_trainer(strategy, measure, max_steps=num_steps, is_cuda=is_cuda)
    trainer.callbacks.append(FusedKernels())  # type: ignore[attr-defined]
    own = mock.patch.object(row_factors, "dora_obstacle", return_value="PEFT's forward is measured")
    if arm == "peft":
        own.start()
    try:
        trainer.fit(tuner, train_dataloaders=loader)
    except torch.OutOfMemoryError as error:
        measure.record["error"] = str(error)[:200]
    finally:
        mock.patch.stopall()
    tuner.model.unload()
    return {"arm": arm, "mode": mode, **measure.record}


def compare(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return the ratios of the times, and the difference of the losses of DoRA's two forwards."""
    by_arm = {record["arm"]: record for record in records if "ms" in record}
    lines = []
    if "lora" in by_arm:
        lines += [
            f"{arm} / lora: {by_arm[arm]['ms'] / by_arm['lora']['ms']:.4f}" for arm in ("dora", "peft") if arm in by_arm
        ]
    if "dora" in by_arm and "peft" in by_arm:
        pairs = list(zip(by_arm["dora"]["losses"], by_arm["peft"]["losses"]))
        worst = max(abs(ours / theirs - 1) for ours, theirs in pairs)
        state = "equal" if worst <= LOSS_TOLERANCE else "NOT EQUAL"
        lines.append(f"losses of dora and peft over {len(pairs)} steps: {state}, at most {worst:.2e} apart")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the arms and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="qwen3-8b-lora", choices=tuple(WORKLOADS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--peft-steps", type=int, default=8)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS)
    parser.add_argument("--mode", default="keep", choices=("keep", "recompute", "auto"))
    parser.add_argument("--peft-mode", default="recompute", choices=("keep", "recompute", "auto"))
    options = parser.parse_args(arguments)
    workload, is_cuda = WORKLOADS[options.workload], options.device == "cuda"
    base, records = make_base(workload, is_cuda=is_cuda), []
    for arm in options.arms:
        is_peft = arm == "peft"
        num_steps = options.peft_steps if is_peft else NUM_WARMUP + options.steps
        mode = options.peft_mode if is_peft else options.mode
        records.append(run_arm(arm, base, workload, num_steps=num_steps, is_cuda=is_cuda, mode=mode))
        gc.collect()
        if is_cuda:
            torch.cuda.empty_cache()
        record = records[-1]
        print(json.dumps({**record, "losses": record.get("losses", [])[:8]}), flush=True)
    print("\n".join(compare(records)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
