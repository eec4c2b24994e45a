"""Build a model block by block on its device, with random weights or given ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_fastft.core.errors import UnsupportedModelError, list_names
from lightning_fastft.hf.dtypes import default_dtype, seeded
from lightning_fastft.hf.loading.quantised_files import without_quantization
from lightning_fastft.hf.loading.source import auto_class

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def initialise(
    config: PretrainedConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    quantization_config: Any,
    home: torch.device,
    seed: int = 0,
    values: Mapping[str, torch.Tensor] | None = None,
) -> PreTrainedModel:
    """Return a model whose blocks are each built and quantised on the device, then moved to their home.

    Its weights are random, or those of values: parameters and buffers by name, of a model with the same configuration
    that is not quantised.
    """
    with torch.device("meta"):
        model = auto_class(config).from_config(without_quantization(config), dtype=dtype)
    quantizer = None
    if quantization_config is not None:
        from transformers.quantizers import AutoHfQuantizer

        quantizer = AutoHfQuantizer.from_config(quantization_config, pre_quantized=False)
        # The layers that replace nn.Linear take the default dtype.
        with default_dtype(dtype):
            quantizer.preprocess_model(model=model, dtype=dtype, device_map={"": device})
    tied = set(model.all_tied_weights_keys)
    finish = functools.partial(_finish, is_quantised=quantizer is not None, home=home)
    with seeded(seed, device=device), torch.no_grad():
        fill = functools.partial(_fill, values=values, device=device)
        _materialise(model, name="", owner=model, tied=tied, fill=fill, finish=finish, is_inside=False)
        finish(model)
    model.tie_weights()
    _move(model, home)
    if quantizer is not None:
        model = quantizer.postprocess_model(model)
        model.hf_quantizer = quantizer
    left = [
        name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.device.type != home.type
    ]
    if left:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be initialised at random: nothing fills {list_names(left)}."
        )
    return model


def _materialise(
    module: nn.Module,
    *,
    name: str,
    owner: Any,
    tied: set[str],
    fill: Callable[..., None],
    finish: Callable[[nn.Module], None],
    is_inside: bool,
) -> None:
    """Fill a module and its descendants, children first, and finish each complete block, and each leaf that is not
    inside of one.
    """
    from transformers import PreTrainedModel

    if isinstance(module, PreTrainedModel):
        owner = module
    prefix = f"{name}." if name else ""
    is_list = isinstance(module, nn.ModuleList)
    for child_name, child in module.named_children():
        _materialise(
            child,
            name=prefix + child_name,
            owner=owner,
            tied=tied,
            fill=fill,
            finish=finish,
            is_inside=is_inside or is_list,
        )
        is_leaf = next(child.children(), None) is None
        if is_list or (is_leaf and not is_inside):
            finish(child)
    fill(module, prefix=prefix, owner=owner, tied=tied)


def _fill(
    module: nn.Module,
    *,
    prefix: str,
    owner: Any,
    tied: set[str],
    values: Mapping[str, torch.Tensor] | None,
    device: torch.device,
) -> None:
    """Give a module's own tensors that are on the meta device their values, or initialise them without values."""

    def place(key: str, tensor: torch.Tensor) -> torch.Tensor:
        if values is None:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return values[prefix + key].detach().to(device)

    for key, parameter in module._parameters.items():
        if parameter is not None and parameter.device.type == "meta" and prefix + key not in tied:
            real = nn.Parameter(place(key, parameter), requires_grad=parameter.requires_grad)
            # bitsandbytes keeps the options of the later quantisation as attributes of its meta parameter.
            real.fastft_options = dict(parameter.__dict__)  # type: ignore[attr-defined]
            module._parameters[key] = real
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.device.type == "meta":
            module._buffers[key] = place(key, buffer)
    if values is None:
        owner._init_weights(module)


def _finish(block: nn.Module, *, is_quantised: bool, home: torch.device) -> None:
    """Quantise the weights of a finished block if asked, and move it to its home."""
    if is_quantised:
        _quantise(block)
    _move(block, home)


def _move(module: nn.Module, home: torch.device) -> None:
    """Move the tensors of a module that have values."""
    module._apply(lambda tensor: tensor if tensor.is_meta or tensor.device == home else tensor.to(home))


def _quantise(block: nn.Module) -> None:
    """Quantise the weights of the bitsandbytes layers and the experts of a finished block to NF4, as reading a file
    does.
    """
    from lightning_fastft.hf.expert_nf4 import quantise_experts

    quantise_experts(block)
    for module in block.modules():
        for key, parameter in module._parameters.items():
            options = {} if parameter is None else vars(parameter).pop("fastft_options", {})
            if "quant_type" in options:
                import bitsandbytes as bnb

                assert parameter is not None
                module._parameters[key] = bnb.nn.Params4bit(parameter.data, **{**options, "requires_grad": False}).to(
                    parameter.device
                )
