"""``fastft plan``: show the activation plan of a config on a GPU without weights, data or training."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import nn

from lightning_fastft.activations.tiles import AUTO_TILES
from lightning_fastft.callbacks.fused_kernels import swaps_of
from lightning_fastft.cli.cluster_plan import plan_layouts, render_layouts
from lightning_fastft.cli.lightning_cli import FastFTCLI
from lightning_fastft.cli.mistakes import CLUSTER_OPTIONS, PLAN_OPTIONS
from lightning_fastft.cli.words import take_option
from lightning_fastft.core.checks import check_float, check_int
from lightning_fastft.core.errors import FastFTError, OptionError
from lightning_fastft.estimate.clusters import Cluster, make_cluster
from lightning_fastft.estimate.costs import MeteredStep, default_vram_bytes, meter_step
from lightning_fastft.estimate.graph_plan import plan_step
from lightning_fastft.estimate.machines import GPUS, Gpu, find_gpu
from lightning_fastft.estimate.optimizer_cost import is_metered
from lightning_fastft.planner.picture import render_plan
from lightning_fastft.planner.prediction import predict
from lightning_fastft.planner.step import Plan, Prediction, StepCost, gib, uniform_plan
from lightning_fastft.strategies.fsdp2 import FastFTFSDPStrategy
from lightning_fastft.training.datamodule import PackedDataModule
from lightning_fastft.training.distillation import DistillationTuner
from lightning_fastft.training.optimization.choice import call_factory
from lightning_fastft.training.optimization.schedule_free import check_schedule
from lightning_fastft.training.reference import ADAPTERS_OFF, STORED, ReferenceTuner
from lightning_fastft.training.reward import RewardTuner
from lightning_fastft.training.rollouts import RolloutDataModule
from lightning_fastft.training.tuner import Tuner

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_fastft.hf.loading.source import ModelSource

DEFAULT_DOCUMENT_TOKENS = 1024
DEFAULT_HOST_GIB = 64.0
_GIB = 2**30


class _Options(NamedTuple):
    """The options of ``fastft plan``; cluster is None without ``--gpus``, and budgets are None unless given.

    planning holds what ``OffloadCheckpointing`` of the config gives to ``plan_on``.
    """

    gpu: Gpu
    is_here: bool
    vram_bytes: int | None
    given_host_bytes: int | None
    document_tokens: int
    cluster: Cluster | None
    step_ms: float | None
    planning: Mapping[str, Any] = {}

    @property
    def host_bytes(self) -> int:
        """Pinned host memory of the run."""
        return int(DEFAULT_HOST_GIB * _GIB) if self.given_host_bytes is None else self.given_host_bytes


def run_plan(words: Sequence[str]) -> int:
    """Print the plan of a config for a GPU, and the speed of recomputing all and keeping all; return 0.

    Args:
        words: Arguments of ``fastft fit``, and ``--gpu NAME`` (default: the local GPU), ``--vram-gib N`` (the
            ``vram_budget`` of the run; default: the config's, else model, optimizer and 90 % of the rest), ``--host-gib
            N`` (default: ``host_budget`` of the config, else 64) and ``--document-tokens N`` (length of the whole
            document of a token, averaged over tokens; 1,024). ``--gpus N`` prints a table of strategies on a cluster
            instead, with ``--nodes`` (1), ``--node-link`` and ``--network`` (``make_cluster``), and ``--step-ms``, the
            measured time of a pack on one GPU.

    Raises:
        OptionError: There is no local GPU and none is named, the GPU is too small, the model of the config is not a
            tuner of this package, or the run holds a second model.
    """
    options, words = _read_options(words)
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
            "fastft plan counts one model, and this run holds a second one: a teacher without store, or a "
            "reference. The plan of a run is made from its first training steps and logged."
        )
    options = options._replace(document_tokens=min(options.document_tokens, data.max_tokens))
    options = _follow_config(options, cli.trainer)
    render = _render_gpu if options.cluster is None else _render_cluster
    run = _describe_run(model, num_tokens=data.max_tokens, document_tokens=options.document_tokens)
    try:
        text = render(options, model, cli.trainer, max_tokens=data.max_tokens)
    except OptionError as error:
        if options.cluster is None and (note := _describe_shards(cli.trainer)):
            raise OptionError(f"{error} {note[0].upper()}{note[1:]}.") from error
        raise
    sys.stdout.write(f"{run}\n{text}\n")
    return 0


def _render_cluster(options: _Options, model: Tuner, trainer: Trainer, *, max_tokens: int) -> str:
    """Return the table of strategies on a cluster."""
    assert options.cluster is not None
    assert model.source is not None
    plans = plan_layouts(
        options.cluster,
        source=model.source,
        options=_cost_options(model, trainer, document_tokens=options.document_tokens),
        num_tokens=max_tokens,
        num_micro=trainer.accumulate_grad_batches,
        planning={
            "vram_budget_bytes": options.vram_bytes,
            "host_budget_bytes": options.host_bytes,
            **options.planning,
        },
        step_ms=options.step_ms,
        adapters=trainer.strategy.adapters if isinstance(trainer.strategy, FastFTFSDPStrategy) else "auto",
    )
    table = render_layouts(options.cluster, plans)
    if options.planning.get("weights") != "stream":
        return table
    return f"{table}\n\nThe config has weights: stream. Strategies with sharded weights refuse it and are not listed."


def _render_gpu(options: _Options, model: Tuner, trainer: Trainer, *, max_tokens: int) -> str:
    """Return the plan for one GPU, and the speed of recomputing all and keeping all."""
    assert model.source is not None
    gpu, num_parts = options.gpu, getattr(trainer.strategy, "context_parallel", 1)
    # Each device computes the rows of its part, and in attention its share of the heads.
    num_tokens = -(-max_tokens // num_parts)
    cost_options = _cost_options(model, trainer, document_tokens=options.document_tokens)
    plan_in = functools.partial(_plan_in_tiles, options, model.source, cost_options, num_tokens=num_tokens)
    num_tiles: int = cost_options["swaps"].mlp_tiles
    try:
        metered, cost, plan = plan_in(num_tiles)
    except OptionError as error:
        checkpointing = getattr(trainer.strategy, "checkpointing", None)
        if checkpointing is None or not checkpointing.options.may_tile:
            raise
        num_tiles = AUTO_TILES
        try:
            metered, cost, plan = plan_in(num_tiles)
        except FastFTError:
            # Tiles are not enough, or no layer has a block that could run in them.
            raise error from None
    policy = options.planning.get("policy", "auto")
    is_chosen = policy == "auto"
    vram_bytes = options.vram_bytes or (default_vram_bytes(gpu, cost) if is_chosen else gpu.memory_bytes)
    describe = functools.partial(_describe_end, num_tokens=num_tokens, vram_bytes=vram_bytes)
    ends = {
        f"{kind} all": predict(cost, uniform_plan(len(cost.segments), kind), machine=gpu.machine)
        for kind in ("recompute", "keep")
    }
    lines = [
        *([f"feed-forward blocks: {num_tiles} tiles"] if num_tiles > 1 else []),
        *([f"mesh: {num_parts} devices share each pack, {num_tokens:,} tokens each"] if num_parts > 1 else []),
        *filter(None, [_describe_shards(trainer)]),
        *([] if is_chosen else [f"activations: {policy}, as the config says"]),
        *(["reference: one more forward, with the adapters off, counts as head"] if metered.has_reference_pass else []),
        f"{gpu.name}: {_describe_origin(options)}",
        f"budgets: {vram_bytes / _GIB:.1f} GiB of device memory for everything (--vram-gib), "
        f"{options.host_bytes / _GIB:.1f} GiB of host memory (--host-gib)",
        *_describe_resident(metered, gpu, num_packs=trainer.accumulate_grad_batches),
        "",
        render_plan(cost, plan),
        "",
        *(describe(name, prediction) for name, prediction in {**ends, "this plan": plan.prediction}.items()),
    ]
    return "\n".join(lines)


def _plan_in_tiles(
    options: _Options, source: ModelSource, cost_options: Mapping[str, Any], num_tiles: int, *, num_tokens: int
) -> tuple[MeteredStep, StepCost, Plan]:
    """Return the step, its costs and the plan with this number of tiles of feed-forward blocks."""
    swaps = cost_options["swaps"]._replace(mlp_tiles=num_tiles)
    metered = meter_step(source, num_tokens=num_tokens, **{**cost_options, "swaps": swaps})
    moments_bytes = metered.optimizer.copied_bytes
    if moments_bytes > options.host_bytes:
        raise OptionError(
            f"The optimizer keeps {moments_bytes / _GIB:.1f} GiB of moments in host memory, and --host-gib is "
            f"{options.host_bytes / _GIB:.1f}. Give a larger --host-gib, or an optimizer with smaller moments."
        )
    cost, plan = plan_step(
        metered,
        gpu=options.gpu,
        vram_budget_bytes=options.vram_bytes,
        host_budget_bytes=options.host_bytes - moments_bytes,
        **options.planning,
    )
    return metered, cost, plan


def _read_options(words: Sequence[str]) -> tuple[_Options, list[str]]:
    """Parse and validate the options of this command; return them and the other arguments."""
    found, rest = {}, list(words)
    for option in (*PLAN_OPTIONS, *CLUSTER_OPTIONS):
        found[option], rest = take_option(rest, option, default="")
    name, vram, step = found["--gpu"], found["--vram-gib"], found["--step-ms"]
    gpu = find_gpu(name or _device_here())
    options = _Options(
        gpu=gpu,
        is_here=not name,
        vram_bytes=_read_gib("--vram-gib", vram) if vram else None,
        given_host_bytes=_read_gib("--host-gib", found["--host-gib"]) if found["--host-gib"] else None,
        document_tokens=_read_int("--document-tokens", found["--document-tokens"] or str(DEFAULT_DOCUMENT_TOKENS)),
        cluster=_read_cluster(gpu, found),
        step_ms=check_float("--step-ms", _read_float("--step-ms", step), low=1e-3) if step else None,
    )
    # The strategy of the config is for the cluster, and this process opens none.
    return options, rest if options.cluster is None else [*rest, "--trainer.devices=1", "--trainer.num_nodes=1"]


def _follow_config(options: _Options, trainer: Trainer) -> _Options:
    """Return the options with those of the config's ``OffloadCheckpointing``; given budgets come first."""
    checkpointing = getattr(trainer.strategy, "checkpointing", None)
    if checkpointing is not None:
        own = checkpointing.options
        if own.policy != "auto" and options.vram_bytes is not None:
            raise OptionError(f"--vram-gib has no effect on policy {own.policy!r} of the config. Remove one of them.")
        options = options._replace(
            vram_bytes=own.vram_budget_bytes if options.vram_bytes is None else options.vram_bytes,
            given_host_bytes=own.host_budget_bytes if options.given_host_bytes is None else options.given_host_bytes,
            planning={"policy": own.policy, "buffers": own.buffers, "weights": own.weights},
        )
    gpu = options.gpu
    if options.vram_bytes is not None and options.vram_bytes > gpu.memory_bytes:
        raise OptionError(
            f"The budget is {options.vram_bytes / _GIB:.1f} GiB, and {gpu.name} has {gpu.memory_bytes / _GIB:.0f}. "
            "Give a smaller --vram-gib, or another --gpu."
        )
    return options


def _read_cluster(gpu: Gpu, found: Mapping[str, str]) -> Cluster | None:
    """Return the cluster of the given options, or None without ``--gpus``."""
    if not found["--gpus"]:
        given = ", ".join(option for option in CLUSTER_OPTIONS if found[option])
        if given:
            raise OptionError(f"{given} belongs to a cluster. Give the number of its GPUs too: --gpus 16.")
        return None
    return make_cluster(
        gpu,
        num_gpus=_read_int("--gpus", found["--gpus"]),
        num_nodes=_read_int("--nodes", found["--nodes"] or "1"),
        node_link=found["--node-link"],
        network=found["--network"],
    )


def _device_here() -> str:
    if not torch.cuda.is_available():
        known = ", ".join(gpu.name for gpu in GPUS)
        raise OptionError(f'There is no local GPU. Name one, for example --gpu "{GPUS[0].name}". Known GPUs: {known}.')
    return torch.cuda.get_device_name()


def _read_float(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise OptionError(f"{name} must be a number, got {text!r}.") from None


def _read_gib(name: str, text: str) -> int:
    """Return a size in GiB as bytes."""
    return int(check_float(name, _read_float(name, text), low=0.0) * _GIB)


def _read_int(name: str, text: str) -> int:
    """Return a whole number of at least 1, which may be written as 1e4."""
    number = _read_float(name, text)
    if not number.is_integer():
        raise OptionError(f"{name} must be a whole number, got {text!r}.")
    return check_int(name, int(number), low=1)


def _has_second_model(model: Tuner) -> bool:
    if isinstance(model, ReferenceTuner):
        return _reads_reference(model) and model.reference not in (ADAPTERS_OFF, STORED)
    return isinstance(model, DistillationTuner) and model.store is None


def _reads_reference(model: Tuner) -> TypeGuard[ReferenceTuner]:
    return isinstance(model, ReferenceTuner) and model.needs_reference


def _cost_options(model: Tuner, trainer: Trainer, *, document_tokens: int) -> dict[str, Any]:
    """Return the options of ``model_costs`` for a tuner's model."""
    from lightning_fastft.hf.dtypes import DTYPES

    has_masters = model.lora is None and model.master_dtype_name == "float32" and model.dtype_name != "float32"
    return {
        "mean_document_tokens": document_tokens,
        "quantization": model.quantization,
        "dtype": DTYPES.get(model.dtype_name, torch.bfloat16),
        "optimizer": _optimizer_of(model, wants_masters=has_masters),
        "has_masters": has_masters,
        "lora": model.lora,
        "swaps": swaps_of(trainer),
        "has_reference_pass": _reads_reference(model) and model.reference == ADAPTERS_OFF,
        # The score of a reward model reads one row of each document.
        "label_share": 1 / document_tokens if isinstance(model, RewardTuner) else 1.0,
    }


def _optimizer_of(
    model: Tuner, *, wants_masters: bool
) -> Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] | None:
    """Return the tuner's own optimizer as a run makes it, with its refusals."""
    if model.optimizer_factory is None:
        return None
    assert model.source is not None
    return functools.partial(
        call_factory,
        model.optimizer_factory,
        learning_rate=model.learning_rate,
        weight_decay=model.weight_decay,
        wants_masters=wants_masters,
        model_name=model.source.name,
    )


def _describe_run(model: Tuner, *, num_tokens: int, document_tokens: int) -> str:
    assert model.source is not None
    training = "every weight" if model.lora is None else f"LoRA r={model.lora.r}"
    base = "" if model.quantization is None else f" on a base in {model.quantization.upper()}"
    run = f"{model.source.name}: {training}{base}, packs of {num_tokens:,} tokens, documents of {document_tokens:,}"
    if model.optimizer_factory is None:
        return run
    # A matrix, because Muon takes nothing else.
    optimizer = model.optimizer_factory([nn.Parameter(torch.zeros(1, 1))])
    check_schedule(optimizer, model.scheduler)
    name = type(optimizer).__name__
    if not is_metered(optimizer):
        return f"{run}\noptimizer: a step of {name} cannot be simulated here; memory and time are those of AdamW"
    return run


def _describe_shards(trainer: Trainer) -> str:
    """Return a line on shards, which the plan of one GPU does not have; "" for a strategy without them."""
    if not isinstance(trainer.strategy, FastFTFSDPStrategy) or trainer.world_size == 1:
        return ""
    return f"shards of fastft_fsdp are not counted, this is a whole model: --gpus {trainer.world_size} counts them"


def _describe_origin(options: _Options) -> str:
    if not options.is_here:
        return f"simulation from published rates ({options.gpu.source})"
    return f"the local GPU, by its published rates ({options.gpu.source}); a run measures its first steps instead"


def _describe_resident(metered: MeteredStep, gpu: Gpu, *, num_packs: int) -> list[str]:
    """Return lines with what the step holds beside activations, and with the time of the optimizer's step."""
    optimizer = metered.optimizer
    copied = optimizer.copied_bytes
    copies = f", which copies {gib(copied)} of moments from host memory and back" if copied else ""
    if copied and optimizer.is_paged:
        copies += ", at most: the driver keeps paged moments on the device while it has room"
    share = f"; a run makes it once in {num_packs} packs, and the figures below in each" if num_packs > 1 else ""
    return [
        f"weights, gradients and optimizer: {gib(metered.held_bytes)}, of which {gib(optimizer.state_bytes)} "
        "are optimizer state",
        f"step of the optimizer: {optimizer.ms_on(gpu):,.1f} ms{copies}{share}",
    ]


def _describe_end(name: str, prediction: Prediction, *, num_tokens: int, vram_bytes: int) -> str:
    is_over = prediction.peak_bytes > vram_bytes
    return (
        f"{name:<15} {num_tokens / prediction.step_ms * 1e3:>9,.0f} tokens/s in "
        f"{prediction.peak_bytes / _GIB:.1f} GiB, {prediction.step_ms:,.0f} ms a pack"
        f"{' (more than the budget)' if is_over else ''}"
    )
