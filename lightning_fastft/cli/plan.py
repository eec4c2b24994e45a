"""``fastft plan``: show the activation plan of a config on a GPU without weights, data or training."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lightning_fastft.cli.lightning_cli import FastFTCLI
from lightning_fastft.cli.words import take_option
from lightning_fastft.core.checks import check_float, check_int
from lightning_fastft.core.errors import OptionError
from lightning_fastft.estimate.costs import default_vram_bytes
from lightning_fastft.estimate.machines import GPUS, Gpu, find_gpu
from lightning_fastft.planner.picture import render_plan
from lightning_fastft.planner.plan import StepCost, make_plan, predict, uniform_plan
from lightning_fastft.training.datamodule import PackedDataModule
from lightning_fastft.training.distillation import DistillationTuner
from lightning_fastft.training.reference import ADAPTERS_OFF, STORED, ReferenceTuner
from lightning_fastft.training.rollouts import RolloutDataModule
from lightning_fastft.training.tuner import Tuner

# Default document length in tokens.
DEFAULT_DOCUMENT_TOKENS = 1024
DEFAULT_HOST_GIB = 64.0
_GIB = 2**30


class _Question(NamedTuple):
    """The options of ``fastft plan``."""

    gpu: Gpu
    is_here: bool
    vram_gib: float | None
    host_gib: float
    document_tokens: int


def run_plan(words: Sequence[str]) -> int:
    """Print the plan of a config for a GPU, and the speed of recomputing all and keeping all; return 0.

    Args:
        words: Arguments of ``fastft fit``, and ``--gpu NAME`` (default: the local GPU), ``--vram-gib N`` (default:
            model, optimizer and 90 % of the rest), ``--host-gib N`` (64) and ``--document-tokens N`` (average length of
            the document of a token; 1,024).

    Raises:
        OptionError: There is no local GPU and none is named, the model of the config is not a tuner of this package, or
            a second model is held beside it.
    """
    question, words = _read_question(words)
    cli = FastFTCLI(words, run=False)
    model, data = cli.model, cli.datamodule
    is_known = isinstance(model, Tuner) and isinstance(data, (PackedDataModule, RolloutDataModule))
    if not is_known or model.source is None:
        raise OptionError(
            "fastft plan needs a tuner and a data module of lightning_fastft. For other modules the plan is made from "
            "the first training steps and logged."
        )
    if _has_second_model(model):
        raise OptionError(
            "fastft plan counts one model, and a second one is held beside it: a teacher without store, or a "
            "reference. The plan of a run is made from its first training steps and logged."
        )
    document_tokens = min(question.document_tokens, data.max_tokens)
    num_parts = getattr(cli.trainer.strategy, "context_parallel", 1)
    # Each device computes the rows of its part, and of attention the heads that are its share.
    num_tokens = -(-data.max_tokens // num_parts)
    cost = _cost_of(model, gpu=question.gpu, num_tokens=num_tokens, document_tokens=document_tokens)
    vram_bytes = default_vram_bytes(question.gpu, cost) if question.vram_gib is None else int(question.vram_gib * _GIB)
    plan = make_plan(
        cost,
        vram_budget_bytes=vram_bytes,
        host_budget_bytes=int(question.host_gib * _GIB),
        machine=question.gpu.machine,
    )
    training = "every weight" if model.lora is None else f"LoRA r={model.lora.r}"
    base = "" if model.quantization is None else f" on a base in {model.quantization.upper()}"
    lines = [
        f"{model.source.name}: {training}{base}, packs of {data.max_tokens:,} tokens, documents of {document_tokens:,}",
        *([f"mesh: {num_parts} devices share each pack, {num_tokens:,} tokens each"] if num_parts > 1 else []),
        f"{question.gpu.name}: {_origin(question)}",
        f"budgets: {vram_bytes / _GIB:.1f} GiB of device memory for everything, {question.host_gib:.1f} GiB of pinned "
        "host memory",
        "",
        render_plan(cost, plan),
        "",
        *(_describe_end(cost, kind, gpu=question.gpu, num_tokens=num_tokens) for kind in ("recompute", "keep")),
        f"{'this plan':<15} {num_tokens / plan.prediction.step_ms * 1e3:>9,.0f} tokens/s",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _read_question(words: Sequence[str]) -> tuple[_Question, list[str]]:
    """Parse and validate the options of this command; return them and the other arguments."""
    name, rest = take_option(words, "--gpu", default="")
    vram, rest = take_option(rest, "--vram-gib", default="")
    host, rest = take_option(rest, "--host-gib", default=str(DEFAULT_HOST_GIB))
    document, rest = take_option(rest, "--document-tokens", default=str(DEFAULT_DOCUMENT_TOKENS))
    question = _Question(
        gpu=find_gpu(name or _device_here()),
        is_here=not name,
        vram_gib=check_float("--vram-gib", _number("--vram-gib", vram), low=0.0) if vram else None,
        host_gib=check_float("--host-gib", _number("--host-gib", host), low=0.0),
        document_tokens=check_int("--document-tokens", int(_number("--document-tokens", document)), low=1),
    )
    return question, rest


def _device_here() -> str:
    if not torch.cuda.is_available():
        known = ", ".join(gpu.name for gpu in GPUS)
        raise OptionError(f'There is no local GPU. Name one, for example --gpu "{GPUS[0].name}". Known GPUs: {known}.')
    return torch.cuda.get_device_name()


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise OptionError(f"{name} must be a number, got {text!r}.") from None


def _has_second_model(model: Tuner) -> bool:
    if isinstance(model, ReferenceTuner):
        return model.needs_reference and model.reference not in (ADAPTERS_OFF, STORED)
    return isinstance(model, DistillationTuner) and model.store is None


def _cost_of(model: Tuner, *, gpu: Gpu, num_tokens: int, document_tokens: int) -> StepCost:
    """Return the cost of a training step of a tuner's model, without building its weights."""
    from lightning_fastft.estimate.costs import model_costs
    from lightning_fastft.hf.dtypes import DTYPES

    assert model.source is not None
    lora = {}
    if model.lora is not None:
        targets = model.lora.target_modules
        lora = {
            "lora_rank": model.lora.r,
            "lora_targets": targets if isinstance(targets, str) else sorted(targets or ()) or "all-linear",
        }
    return model_costs(
        model.source,
        num_tokens=num_tokens,
        mean_document_tokens=document_tokens,
        machine=gpu,
        quantization=model.quantization,
        dtype=DTYPES.get(model.dtype_name, torch.bfloat16),
        has_masters=model.lora is None and model.master_dtype_name == "float32" and model.dtype_name != "float32",
        **lora,
    )


def _origin(question: _Question) -> str:
    if not question.is_here:
        return f"simulation from published rates ({question.gpu.source})"
    return f"the local GPU, by its published rates ({question.gpu.source}); a run measures its first steps instead"


def _describe_end(cost: StepCost, kind: str, *, gpu: Gpu, num_tokens: int) -> str:
    prediction = predict(cost, uniform_plan(len(cost.segments), kind), machine=gpu.machine)
    speed = num_tokens / prediction.step_ms * 1e3
    return (
        f"{kind + ' all':<15} {speed:>9,.0f} tokens/s in {prediction.peak_bytes / _GIB:.1f} GiB, "
        f"{prediction.step_ms:,.0f} ms a pack"
    )
