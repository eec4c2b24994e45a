"""``fastft plan``: show the activation plan of a config on a GPU without weights, data or training."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lightning_fastft.callbacks.bincount_router import BincountRouter
from lightning_fastft.callbacks.fused_kernels import FusedKernels
from lightning_fastft.cli.cluster_plan import plan_layouts, render_layouts
from lightning_fastft.cli.lightning_cli import FastFTCLI
from lightning_fastft.cli.words import take_option
from lightning_fastft.core.checks import check_float, check_int
from lightning_fastft.core.errors import OptionError
from lightning_fastft.estimate.clusters import Cluster, make_cluster
from lightning_fastft.estimate.costs import Swaps, default_vram_bytes, model_costs, plan_on
from lightning_fastft.estimate.machines import GPUS, Gpu, find_gpu
from lightning_fastft.planner.picture import render_plan
from lightning_fastft.planner.plan import StepCost, predict, uniform_plan
from lightning_fastft.training.datamodule import PackedDataModule
from lightning_fastft.training.distillation import DistillationTuner
from lightning_fastft.training.reference import ADAPTERS_OFF, STORED, ReferenceTuner
from lightning_fastft.training.rollouts import RolloutDataModule
from lightning_fastft.training.tuner import Tuner

if TYPE_CHECKING:
    import lightning.pytorch as pl

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
    cluster: Cluster | None
    step_ms: float | None


def run_plan(words: Sequence[str]) -> int:
    """Print the plan of a config for a GPU, and the speed of recomputing all and keeping all; return 0.

    Args:
        words: Arguments of ``fastft fit``, and ``--gpu NAME`` (default: the local GPU), ``--vram-gib N`` (the
            ``vram_budget`` of the run; default: model, optimizer and 90 % of the rest), ``--host-gib N`` (64) and
            ``--document-tokens N`` (average length of the document of a token; 1,024). With ``--gpus N`` a table of
            strategies on a cluster instead: ``--nodes`` (1), ``--node-link`` and ``--network`` (``make_cluster``), and
            ``--step-ms``, the measured time of a pack on one GPU.

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
    if question.cluster is not None:
        plans = plan_layouts(
            question.cluster,
            source=model.source,
            options=_cost_options(model, cli.trainer, document_tokens=document_tokens),
            num_tokens=data.max_tokens,
            num_micro=cli.trainer.accumulate_grad_batches,
            host_bytes=int(question.host_gib * _GIB),
            vram_bytes=None if question.vram_gib is None else int(question.vram_gib * _GIB),
            step_ms=question.step_ms,
        )
        sys.stdout.write(_describe_run(model, num_tokens=data.max_tokens, document_tokens=document_tokens) + "\n")
        sys.stdout.write(render_layouts(question.cluster, plans) + "\n")
        return 0
    num_parts = getattr(cli.trainer.strategy, "context_parallel", 1)
    # Each device computes the rows of its part, and of attention the heads that are its share.
    num_tokens = -(-data.max_tokens // num_parts)
    options = _cost_options(model, cli.trainer, document_tokens=document_tokens)
    cost = model_costs(model.source, num_tokens=num_tokens, machine=question.gpu, **options)
    vram_bytes = None if question.vram_gib is None else int(question.vram_gib * _GIB)
    host_bytes = int(question.host_gib * _GIB)
    plan = plan_on(question.gpu, cost, vram_budget_bytes=vram_bytes, host_budget_bytes=host_bytes)
    vram_gib = question.vram_gib or default_vram_bytes(question.gpu, cost) / _GIB
    lines = [
        _describe_run(model, num_tokens=data.max_tokens, document_tokens=document_tokens),
        *([f"mesh: {num_parts} devices share each pack, {num_tokens:,} tokens each"] if num_parts > 1 else []),
        f"{question.gpu.name}: {_origin(question)}",
        f"budgets: {vram_gib:.1f} GiB of device memory for everything, {question.host_gib:.1f} GiB of pinned "
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
    gpu = find_gpu(name or _device_here())
    cluster, step, rest = _read_cluster(gpu, rest)
    question = _Question(
        gpu=gpu,
        is_here=not name,
        vram_gib=check_float("--vram-gib", _number("--vram-gib", vram), low=0.0) if vram else None,
        host_gib=check_float("--host-gib", _number("--host-gib", host), low=0.0),
        document_tokens=check_int("--document-tokens", int(_number("--document-tokens", document)), low=1),
        cluster=cluster,
        step_ms=check_float("--step-ms", _number("--step-ms", step), low=1e-3) if step else None,
    )
    return question, rest


def _read_cluster(gpu: Gpu, words: Sequence[str]) -> tuple[Cluster | None, str, list[str]]:
    """Parse the options of a cluster; return it, or None without ``--gpus``, the step's time, and other arguments."""
    gpus, rest = take_option(words, "--gpus", default="")
    found = {}
    for option in ("--nodes", "--node-link", "--network", "--step-ms"):
        found[option], rest = take_option(rest, option, default="")
    if not gpus:
        given = ", ".join(option for option, value in found.items() if value)
        if given:
            raise OptionError(f"{given} belongs to a cluster. Give the number of its GPUs too: --gpus 16.")
        return None, "", rest
    cluster = make_cluster(
        gpu,
        num_gpus=check_int("--gpus", int(_number("--gpus", gpus)), low=1),
        num_nodes=check_int("--nodes", int(_number("--nodes", found["--nodes"] or "1")), low=1),
        node_link=found["--node-link"],
        network=found["--network"],
    )
    # The strategy of the config is for the cluster, and this process opens none.
    return cluster, found["--step-ms"], [*rest, "--trainer.devices=1", "--trainer.num_nodes=1"]


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


def _cost_options(model: Tuner, trainer: pl.Trainer, *, document_tokens: int) -> dict[str, Any]:
    """Return the options of ``model_costs`` for a tuner's model."""
    from lightning_fastft.hf.dtypes import DTYPES

    return {
        "mean_document_tokens": document_tokens,
        "quantization": model.quantization,
        "dtype": DTYPES.get(model.dtype_name, torch.bfloat16),
        "optimizer": model.optimizer_factory,
        "has_masters": model.lora is None and model.master_dtype_name == "float32" and model.dtype_name != "float32",
        "lora": model.lora,
        "swaps": _swaps(trainer),
    }


def _swaps(trainer: pl.Trainer) -> Swaps:
    """Return what the callbacks and the strategy of a run change in its layers."""
    callbacks: list[Any] = getattr(trainer, "callbacks", [])
    fused = next((callback for callback in callbacks if isinstance(callback, FusedKernels)), None)
    checkpointing = getattr(trainer.strategy, "checkpointing", None)
    return Swaps(
        is_fused=fused is not None,
        is_graphed=False if fused is None else fused.cuda_graphs,
        is_fp8=fused is not None and fused.base_compute == "fp8",
        has_router=any(isinstance(callback, BincountRouter) for callback in callbacks),
        mlp_tiles=getattr(checkpointing, "mlp_tiles", 1),
    )


def _describe_run(model: Tuner, *, num_tokens: int, document_tokens: int) -> str:
    assert model.source is not None
    training = "every weight" if model.lora is None else f"LoRA r={model.lora.r}"
    base = "" if model.quantization is None else f" on a base in {model.quantization.upper()}"
    return f"{model.source.name}: {training}{base}, packs of {num_tokens:,} tokens, documents of {document_tokens:,}"


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
