"""Steps of building a model: find the mesh, open the model, transform it, add adapters, describe it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    Callback,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_fastft.core.errors import OptionError
from lightning_fastft.core.phases import phase
from lightning_fastft.core.status import Status
from lightning_fastft.strategies.fsdp2 import FastFTFSDPStrategy
from lightning_fastft.strategies.mixin import FastFTStrategyMixin
from lightning_fastft.training.datamodule import PackedDataModule

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from lightning_fastft.hf.sharding.fillers import Filler
    from lightning_fastft.hf.sharding.units import AdapterPlacement
    from lightning_fastft.packing.document import Document
    from lightning_fastft.training.model.causal_lm import CausalLMModule

Average = Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]
Transform = Callable[[Any], Any]
Stage = Literal["before_adapters", "after_adapters"]

STAGES = ("before_adapters", "after_adapters")


def check_averaging(
    trainer: Trainer | None, module: LightningModule, *, is_copied_whole: bool, is_sharded: bool
) -> Callback | None:
    """Return Lightning's callback that averages weights; refuse one that would average other tensors, or round them.

    Args:
        trainer: The Trainer of the run, if there is one.
        module: The module after its model was built.
        is_copied_whole: Whether a copy of the module from before that has the same parameters.
        is_sharded: Whether the model will be sharded.

    Raises:
        OptionError: Such a callback is there.
    """
    callbacks = [] if trainer is None else trainer.callbacks  # type: ignore[attr-defined]
    if not is_copied_whole and any(isinstance(callback, StochasticWeightAveraging) for callback in callbacks):
        raise OptionError(
            "StochasticWeightAveraging copies the module before its model is built, so it would average nothing or "
            "other weights. Use WeightAveraging or EMAWeightAveraging."
        )
    averaging = next((callback for callback in callbacks if isinstance(callback, WeightAveraging)), None)
    if averaging is None:
        return None
    name = type(averaging).__name__
    if is_sharded:
        raise OptionError(
            f"{name} copies the module, and a model that FSDP2 shards cannot be copied. Remove it, or train with "
            "strategy='fastft_ddp', where each device holds a whole model."
        )
    for parameter_name, parameter in module.named_parameters():
        if parameter.dtype is torch.float32:
            continue
        if not parameter.requires_grad:
            raise OptionError(
                f"{name} averages frozen weights too, and would round {parameter_name} ({parameter.dtype}) at every "
                "step. Remove it, or hold the frozen weights in float32: dtype='float32' without quantization."
            )
        raise OptionError(
            f"{name} would hold the average of {parameter_name} in {parameter.dtype}, which rounds most of its steps "
            "away. Remove it, or set dtype='float32'."
        )
    return averaging


def check_early_callbacks(callbacks: Iterable[Callback], *, tuner: CausalLMModule) -> None:
    """Refuse Lightning's callbacks that change the parameters of a module in ``setup``, before its model is built.

    Args:
        callbacks: The callbacks of the Trainer.
        tuner: The module, which may have no model yet.

    Raises:
        OptionError: Such a callback is there.
    """
    # A property may read the model, which is not there yet.
    has_backbone = hasattr(type(tuner), "backbone") or hasattr(tuner, "backbone")
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, ModelPruning):
            raise OptionError(
                f"{name} masks weights in hooks of their layers, which are not there yet and which fused layers do not "
                "run. Remove it, and prune the model before or after training."
            )
        if isinstance(callback, BaseFinetuning) and tuner.has_adapters:
            raise OptionError(
                f"{name} would freeze and train weights of the base, and checkpoints of adapters do not hold those. "
                "Remove it, name the layers in lora={'target_modules': ...} or {'modules_to_save': ...}, or train all "
                "weights without lora."
            )
        if isinstance(callback, BackboneFinetuning) and not has_backbone:
            raise OptionError(
                f"{name} freezes and trains pl_module.backbone, and this module has no attribute backbone. Use a "
                "subclass of BaseFinetuning that freezes and unfreezes layers of pl_module.model, or give a subclass "
                "of the tuner a property backbone."
            )
        if isinstance(callback, BaseFinetuning) and tuner.model is None:
            raise OptionError(
                f"{name} freezes parameters before the model is built, so it would freeze none. Build the model first "
                "and give it: FineTuner(AutoModelForCausalLM.from_pretrained(...))."
            )


def keep_equal_tensors(average: Average) -> Average:
    """Return an averaging function that leaves averages as they are where they equal the current value.

    0.999 x + 0.001 x is not x in floating point. Frozen weights and the frequencies of rotary embeddings would drift by
    1e-5 of their value with a decay of 0.999 and by 2e-4 with one of 0.9999.

    Example:
        >>> average = keep_equal_tensors(lambda averaged, current, num_averaged: 0.9 * averaged + 0.1 * current)
        >>> average(torch.tensor([0.7, 1.0]), torch.tensor([0.7, 0.0]), 1)
        tensor([0.7000, 0.9000])
    """

    def average_others(averaged: torch.Tensor, current: torch.Tensor, num_averaged: Any) -> torch.Tensor:
        return torch.where(averaged == current, averaged, average(averaged, current, num_averaged))

    return average_others


def find_mesh(strategy: Strategy | None) -> DeviceMesh | None:
    """Return the data-parallel mesh of a strategy that shards models, else None.

    Raises:
        OptionError: The strategy is tensor parallel.
    """
    if not isinstance(strategy, ModelParallelStrategy):
        return None
    mesh = strategy.device_mesh
    if mesh["tensor_parallel"].size() != 1:
        raise OptionError(
            f"FineTuner is data parallel only, and {type(strategy).__name__} was given "
            f"tensor_parallel_size={mesh['tensor_parallel'].size()}: use Trainer(strategy='fastft_fsdp')."
        )
    return strategy.sharding_mesh if isinstance(strategy, FastFTFSDPStrategy) else mesh["data_parallel"]


def check_processes(trainer: Trainer | None) -> None:
    """Refuse to train a model that is built in processes whose weights would be lost when they end.

    Lightning's ``spawn`` and ``fork`` copy the trained weights back into the module of the main process, which has no
    model to take them.

    Raises:
        OptionError: The strategy starts such processes.
    """
    method = "popen" if trainer is None else getattr(trainer.strategy, "_start_method", "popen")
    if trainer is not None and method != "popen" and trainer.state.fn == TrainerFn.FITTING:
        raise OptionError(
            f"start_method={method!r} trains in processes that end with the run, and the model that is built there is "
            "lost. Start the script by torchrun, or as a script with strategy='fastft_ddp' or 'fastft_fsdp'; in a "
            "notebook train on one device."
        )


def place_adapters(strategy: Strategy | None) -> AdapterPlacement:
    """Return where a strategy holds LoRA factors: strategies other than ours average only gradients of shards."""
    return strategy.adapters if isinstance(strategy, FastFTFSDPStrategy) else "shard"


def find_base(model: Any) -> Any:
    """Return the transformers model inside a PEFT model, or the model itself."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def find_device(module: LightningModule) -> torch.device:
    """Return the device of this rank."""
    return module.device if module._trainer is None else module.trainer.strategy.root_device


def stream_if_larger(module: CausalLMModule, *, dtype: torch.dtype, is_sharded: bool) -> None:
    """Let the strategy stream the base of adapters in this run, if it is larger than the memory for the run."""
    from lightning_fastft.hf.loading.source import weight_files
    from lightning_fastft.hf.sharding.fillers import reads_base

    strategy = None if module._trainer is None else module.trainer.strategy
    is_computed = module.model is None and module.lora is not None and reads_base(module.lora)
    if is_sharded or is_computed or not module.has_adapters or not isinstance(strategy, FastFTStrategyMixin):
        return

    def measure(budget: int) -> int:
        model, source = module.model, module.source
        if model is not None:
            from lightning_fastft.estimate.meta_model import held_bytes

            # A model on the device has found its place.
            return held_bytes(model) if next(model.parameters()).device.type == "cpu" else 0
        assert source is not None
        # A weight has one byte or more in files that are not quantised, and half a byte or more in others.
        is_quantised = getattr(source.config, "quantization_config", None) is not None
        paths = weight_files(source) if source.init == "pretrained" else []
        if paths and sum(map(os.path.getsize, paths)) * dtype.itemsize * (1 + is_quantised) <= budget:
            return 0
        from lightning_fastft.estimate.meta_model import measure_weights

        return measure_weights(source, dtype=dtype, quantization=module.quantization)

    strategy.stream_if_larger(measure)


def find_home(module: LightningModule, *, lora: LoraConfig | None) -> torch.device:
    """Return where the tensors of a model that is not sharded are when it is built: on the host if the strategy streams
    them from there, else on the device, as for adapters that are computed from the base.
    """
    device, strategy = find_device(module), None if module._trainer is None else module.trainer.strategy
    if not isinstance(strategy, FastFTStrategyMixin) or not strategy.checkpointing.streams_from_host:
        return device
    from lightning_fastft.hf.sharding.fillers import reads_base

    return device if lora is not None and reads_base(lora) else strategy.weights_device


def open_source(
    module: CausalLMModule, *, dtype: torch.dtype, is_sharded: bool
) -> tuple[PreTrainedModel, Filler | None]:
    """Return the finished model of a module's source; or a model that is filled while it is sharded, with what fills
    it.
    """
    from lightning_fastft.hf.loading.model import build_model
    from lightning_fastft.hf.sharding.fillers import open_model, reads_base

    assert module.source is not None
    options: dict[str, Any] = {
        "device": find_device(module),
        "dtype": dtype,
        "quantization": module.quantization,
        "seed": module._seed,
    }
    with phase("loading the model"):
        if is_sharded:
            is_read_early = module.lora is not None and reads_base(module.lora)
            return open_model(module.source, is_read_early=is_read_early, **options)
        return build_model(module.source, home=find_home(module, lora=module.lora), **options), None


def open_frozen_model(source: str | nn.Module, *, module: LightningModule, dtype: torch.dtype) -> nn.Module:
    """Return a second model in evaluation mode, without gradients: read from a folder or the hub, or as it is."""
    model: nn.Module
    if isinstance(source, nn.Module):
        model = source
    else:
        from lightning_fastft.hf.loading.model import build_model
        from lightning_fastft.hf.loading.source import ModelSource

        with phase("loading the second model"):
            device, home = find_device(module), find_home(module, lora=None)
            model = build_model(ModelSource(source, init="pretrained"), device=device, dtype=dtype, home=home)
    return model.requires_grad_(False).eval()


def first_packs(trainer: Trainer) -> list[list[Document]]:
    """Return the documents of the first training packs of a Trainer's data module; none if it has no packs."""
    from lightning_fastft.hf.eva import MOST_PACKS

    data = getattr(trainer, "datamodule", None)
    subset, packs = (data.subset("train"), data.packs("train")) if isinstance(data, PackedDataModule) else (None, None)
    if subset is None or packs is None:
        return []
    return [[subset[int(number)] for number in packs[place]] for place in range(min(MOST_PACKS, len(packs)))]


def apply_transforms(model: Any, transforms: Iterable[tuple[Transform, Stage]], *, stage: Stage) -> Any:
    """Return the model after the transforms of one stage."""
    for transform, wanted in transforms:
        if wanted == stage:
            changed = transform(model)
            model = model if changed is None else changed
    return model


def add_lora(model: PreTrainedModel, *, lora: LoraConfig, module: CausalLMModule, filler: Filler | None) -> PeftModel:
    """Return the PEFT model with adapters: those of the folder ``adapter``, or new ones; and frozen ones beside them.

    PEFT's copies of whole modules (modules_to_save) stay in the dtype of the base, so they are no fp32 masters; a
    warning names them.
    """
    from lightning_fastft.hf.lora import add_adapters
    from lightning_fastft.hf.lora_folders import add_frozen_adapters, check_adapter_base, load_adapter
    from lightning_fastft.hf.lora_init import ADAPTER, initialise_loftq

    source, options, compute_dtype = module.source, module._options, model.dtype
    adapter = None if options.adapter is None else os.path.expanduser(options.adapter)
    frozen_adapters = [os.path.expanduser(folder) for folder in options.frozen_adapters or ()]
    for folder in (*([] if adapter is None else [adapter]), *frozen_adapters):
        check_adapter_base(folder, base=model, source=source, accept_other=options.accept_other_base)
    if source is not None and adapter is None and lora.revision not in (None, source.revision):
        raise OptionError(
            f"lora.revision={lora.revision!r} is not the revision of the model that is loaded "
            f"({source.revision or 'the default branch'}). Give revision={lora.revision!r} beside the model."
        )
    with_loftq = lora.init_lora_weights == "loftq"
    if with_loftq:
        # Saved adapters must not ask PEFT for LoftQ, which would quantise the base that they are loaded onto.
        lora.init_lora_weights = True
    with nullcontext() if filler is None else filler.placeholders(model):
        adapted = add_adapters(model, lora=lora, adapter_dtype=module.adapter_dtype, seed=module._seed)
        if source is not None:
            # As get_peft_model(revision=...): what reads the saved adapters loads this revision of the base.
            adapted.peft_config[ADAPTER].revision = source.revision
        if adapter is not None:
            load_adapter(adapted, adapter)
        if frozen_adapters:
            add_frozen_adapters(adapted, frozen_adapters)
    if with_loftq:
        assert source is not None
        initialise_loftq(adapted, source)
    others = [
        name
        for name, parameter in adapted.named_parameters()
        if parameter.requires_grad and parameter.dtype != module.adapter_dtype
    ]
    if others:
        rank_zero_warn(
            f"{len(others)} trained tensors are copies of base modules and stay in {compute_dtype}, for example "
            f"{others[0]}."
        )
    return adapted


def describe_model(
    model: Any, *, quantization: str | None, skipped: Mapping[str, int] | None, initialisation: object
) -> list[Status]:
    """Return the statuses of the NF4 base and of LoRA, with the initialisation that was asked for."""
    found = [Status("NF4 base", "inactive", "not asked for")]
    if quantization is not None:
        from lightning_fastft.hf.expert_nf4 import describe_experts

        found = [Status("NF4 base", "active", "bitsandbytes, double quantisation")]
        experts = describe_experts(model)
        if experts.state == "active":
            found.append(experts)
    if hasattr(model, "peft_config"):
        from lightning_fastft.hf.lora_targets import describe_adapters

        lora = next(iter(model.peft_config.values()))
        shown = describe_adapters(model, lora, skipped=skipped, initialisation=initialisation)
        found.append(Status("LoRA", "active", shown))
    return found
