"""A model on the meta device with what a run gives it: NF4 weights, adapters, patches, and a pack to run on."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.estimate import nf4_shapes
from lightning_fastft.fused.install import fuse_weight_buffers, install_fp8_base, install_fused_layers
from lightning_fastft.fused.low_precision_adapters import install_low_precision_adapters
from lightning_fastft.hf.expert_nf4 import quantise_experts
from lightning_fastft.hf.families import decoder_layers
from lightning_fastft.hf.loading.source import ModelSource, auto_class
from lightning_fastft.hf.lora import cast_adapters, check_patterns, without_pattern_warning
from lightning_fastft.hf.lora_targets import copy_with_targets
from lightning_fastft.kernels.nf4_experts.reference import BLOCK_WEIGHTS, GROUP_BLOCKS
from lightning_fastft.moe.install import install_bincount_router, install_fp8_experts
from lightning_fastft.packing.collate import PackedBatch
from lightning_fastft.packing.context import BatchContext
from lightning_fastft.packing.document import IGNORED_LABEL
from lightning_fastft.patches.packed import install_packed_training

if TYPE_CHECKING:
    from peft import LoraConfig


class Swaps(NamedTuple):
    """Callbacks of a run that change its layers.

    Args:
        is_fused: FusedKernels.
        is_graphed: Its ``cuda_graphs``: "auto" records layers that are launch-bound.
        is_fp8: The same with ``base_compute="fp8"``.
        has_router: BincountRouter.
        mlp_tiles: ``mlp_tiles`` of OffloadCheckpointing.
    """

    is_fused: bool = True
    is_graphed: bool | str = False
    is_fp8: bool = False
    has_router: bool = True
    mlp_tiles: int = 1


class _WithoutValues(TorchFunctionMode):
    """Skip ``torch.nn.init``: on the meta device there are no values, and a call takes as long as the module."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return options["tensor"] if "tensor" in options else args[0]
        return func(*args, **options)


def build_on_meta(
    model: PretrainedConfig | Mapping[str, Any] | ModelSource, *, dtype: torch.dtype = torch.bfloat16
) -> PreTrainedModel:
    """Return the model of a configuration on the meta device, without adapters."""
    source = model if isinstance(model, ModelSource) else ModelSource(model, init="random")  # type: ignore[arg-type]
    with torch.device("meta"), _WithoutValues():
        return auto_class(source.config).from_config(source.config, dtype=dtype).train()


def quantise_on_meta(model: PreTrainedModel, *, dtype: torch.dtype) -> None:
    """Give linear layers other than the head, and stacks of experts, weights in NF4 without numbers."""
    state_class: Any = nf4_shapes.QuantState
    layer_class: Any = nf4_shapes.Linear4bit
    weight_class: Any = nf4_shapes.Params4bit
    if find_spec("bitsandbytes") is not None:
        from bitsandbytes.functional import QuantState
        from bitsandbytes.nn import Linear4bit, Params4bit

        state_class, layer_class, weight_class = QuantState, Linear4bit, Params4bit
    head = model.get_output_embeddings()
    for name, linear in [*model.named_modules()]:
        if type(linear) is not nn.Linear or linear is head:
            continue
        num_weights = linear.weight.numel()
        num_blocks = -(-num_weights // BLOCK_WEIGHTS)
        with torch.device("meta"), _WithoutValues():
            nested = state_class(
                torch.empty(-(-num_blocks // GROUP_BLOCKS)),
                blocksize=GROUP_BLOCKS,
                code=torch.empty(256),
                dtype=torch.float32,
            )
            state = state_class(
                torch.empty(num_blocks, dtype=torch.uint8),
                shape=linear.weight.shape,
                dtype=dtype,
                blocksize=BLOCK_WEIGHTS,
                code=torch.empty(16),
                quant_type="nf4",
                offset=torch.empty(()),
                state2=nested,
            )
            packed = torch.empty(num_weights // 2, 1, dtype=torch.uint8)
            layer = layer_class(
                linear.in_features, linear.out_features, linear.bias is not None, compute_dtype=dtype, quant_type="nf4"
            )
        layer.weight = weight_class(
            packed, requires_grad=False, quant_state=state, quant_type="nf4", bnb_quantized=True, module=layer
        )
        layer.bias = linear.bias
        layer.support_avx512bf16_for_cpu = False
        model.set_submodule(name, layer)
    quantise_experts(model)


def measure_weights(source: ModelSource, *, dtype: torch.dtype, quantization: Literal["nf4"] | None = None) -> int:
    """Return the memory of the weights of a model that is not loaded, in bytes, without adapters.

    Files in 4 bits count as NF4. Constants of NF4 are a few hundred bytes of each weight, and not counted.

    Cost:
        0.7 s on the host for Qwen3-14B.
    """
    held = getattr(source.config, "quantization_config", None) or {}
    is_nf4 = held.get("load_in_4bit") if isinstance(held, Mapping) else getattr(held, "load_in_4bit", False)
    with torch.random.fork_rng(devices=[]):
        # transformers writes to the configuration.
        model = build_on_meta(copy.deepcopy(source.config), dtype=dtype)
        if quantization or is_nf4:
            quantise_on_meta(model, dtype=dtype)
    return held_bytes(model)


def held_bytes(model: nn.Module) -> int:
    """Return the memory of the weights of a model, in bytes, without constants of NF4."""
    scales = [state.absmax for item in model.parameters() if (state := getattr(item, "quant_state", None))]
    return sum(getattr(item, "held_bytes", item.nbytes) for item in (*model.parameters(), *scales))


def add_adapters_on_meta(model: PreTrainedModel, lora: LoraConfig | int) -> None:
    """Add adapters to the modules of the model."""
    from peft import LoraConfig, inject_adapter_in_model

    lora = LoraConfig(r=lora) if isinstance(lora, int) else lora
    check_patterns(lora, [name for name, _ in model.named_modules()])
    lora, _ = copy_with_targets(model, lora)
    # There are no weights that LoftQ and others could read.
    lora.init_lora_weights = False
    with torch.device("meta"), _WithoutValues(), without_pattern_warning(model, lora):
        inject_adapter_in_model(lora, model)
    cast_adapters(model, torch.float32)


def make_batch(num_tokens: int, *, document_tokens: float, label_share: float) -> PackedBatch:
    """Return a pack of equal documents on the meta device, whose last tokens are labelled."""
    length = max(2, min(num_tokens, round(document_tokens)))
    lengths = [length] * (num_tokens // length) + [num_tokens % length] * bool(num_tokens % length)
    label_T = torch.full((num_tokens,), IGNORED_LABEL)
    end = 0
    for length in lengths:
        end += length
        label_T[end - min(length - 1, round(label_share * length)) : end] = 0
    context = BatchContext(lengths=lengths, label_T=label_T, num_items=max(1, int((label_T == 0).sum())))
    return PackedBatch(input_id_T=torch.zeros(num_tokens, dtype=torch.int64), context=context).to("meta")


def install_as_in_a_run(
    model: PreTrainedModel, patcher: ModelPatcher, checkpointing: OffloadCheckpointing, *, swaps: Swaps
) -> bool:
    """Patch a model as a run does; return whether its layers are fused."""
    is_fused = False
    if swaps.has_router:
        install_bincount_router(model, patcher)
    if swaps.is_fused:
        is_fused = any(status.state == "active" for status in install_fused_layers(model, patcher, awaits_copies=True))
    if swaps.is_fp8:
        # In plain PyTorch, because the meta device has no compute capability.
        install_fp8_base(model, patcher, is_emulated=True)
        install_fp8_experts(model, patcher, is_emulated=True)
    install_low_precision_adapters(model, patcher, compute_dtype=model.dtype)
    install_packed_training(model, patcher, checkpointing=checkpointing)
    if is_fused and not swaps.is_fp8:
        fuse_weight_buffers(model, patcher, device_types=("meta",))
    return is_fused


@contextlib.contextmanager
def first_layers(model: PreTrainedModel) -> Iterator[list[int]]:
    """Let a model run only its first decoder layers, as many as there are kinds.

    Yields:
        For each decoder layer, the place of one of equal cost among those that run.
    """
    layers = decoder_layers(model)
    name = next(
        name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and layers[0] in [*module]
    )
    kinds = [_kind_of(layer) for layer in layers]
    num_layers = max(kinds.index(kind) for kind in kinds) + 2
    # The first layer also takes the end of its backward, so the costs of the last layer of a kind are used for all.
    place_of = {kind: place for place, kind in enumerate(kinds[:num_layers])}
    whole = model.get_submodule(name)
    model.set_submodule(name, nn.ModuleList(layers[:num_layers]))
    try:
        yield [place_of[kind] for kind in kinds]
    finally:
        model.set_submodule(name, whole)


def _kind_of(layer: nn.Module) -> tuple[Any, ...]:
    """Return a key that is equal for layers of equal cost: modules with their plain attributes, and shapes."""
    modules = tuple(
        (name, type(module).__name__, *((key, value) for key, value in vars(module).items() if _is_plain(key, value)))
        for name, module in layer.named_modules()
    )
    shapes = tuple(
        (name, tuple(parameter.shape), parameter.requires_grad) for name, parameter in layer.named_parameters()
    )
    return modules, shapes


def _is_plain(name: str, value: object) -> bool:
    return name not in ("layer_idx", "training") and isinstance(value, (bool, int, float, str, type(None)))
