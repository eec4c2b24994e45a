"""Checkpoints whose files hold quantised weights; transformers reads fp8 and MXFP4 dequantised."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_fastft.core.errors import DataError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_DEQUANTISED = frozenset({"fp8", "mxfp4"})


def quantization_method(config: PretrainedConfig) -> str | None:
    """Return the method that quantised the files of a checkpoint, such as "fp8", "mxfp4" or "bitsandbytes", or None."""
    method = _options(config).get("quant_method")
    # "bitsandbytes_4bit" in some files.
    return None if method is None else re.sub("_[48]bit$", "", str(getattr(method, "value", method)))


def dequantised_format(config: PretrainedConfig) -> str | None:
    """Return the format of files that are dequantised when read, "fp8" or "mxfp4", and None for other files."""
    method = quantization_method(config)
    return method if method in _DEQUANTISED else None


def dequantising(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of the configuration of a checkpoint with which transformers dequantises what it reads."""
    config = copy.deepcopy(config)
    config.quantization_config = {**_options(config), "dequantize": True}
    return config


def save_as_dense(model: PreTrainedModel) -> None:
    """Let a model that was read dequantised be saved under the names of its parameters.

    transformers 5.17 would revert the dequantisation, and write names that no reader knows.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    read = getattr(model, "_weight_conversions", None)
    if read is not None:
        prefixes = [change for change in read if isinstance(change, PrefixChange)]
        usual = get_model_conversion_mapping(model, add_legacy=False)
        model._weight_conversions = prefixes + [change for change in usual if not isinstance(change, PrefixChange)]


def refuse_forward_only(model: PreTrainedModel) -> None:
    """Raise on a model that is trained although its frozen weights are in a format without a backward.

    Gradients would pass such a layer by its residual connection only, without an error.

    Raises:
        UnsupportedModelError: transformers says that the model's format cannot be trained; the message names it.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None or quantizer.is_trainable or not any(weight.requires_grad for weight in model.parameters()):
        return
    method = quantizer.quantization_config.quant_method
    raise UnsupportedModelError(
        f"{type(model).__name__} holds weights quantised by {getattr(method, 'value', method)}, which transformers "
        "cannot differentiate. Load the model dequantised or in bf16, or give the name of its checkpoint to FineTuner, "
        "which dequantises fp8 and MXFP4."
    )


def without_quantization(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of a configuration that does not say how files are quantised."""
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def check_scales(paths: Sequence[str], config: PretrainedConfig, *, name: str) -> None:
    """Raise on weights in fp8 whose scales transformers would read wrongly, or not at all.

    It divides a weight into as many equal blocks as there are scales: 192 rows in blocks of 128 become two blocks of
    96. A weight without scales keeps its numbers in fp8. Neither is an error there.

    Raises:
        DataError: A weight has no scales, or another number of them than it has blocks.
        UnsupportedModelError: The last block of a weight is smaller than the others.

    Cost:
        Reads the headers only.
    """
    from safetensors import safe_open

    if quantization_method(config) != "fp8":
        return
    block = _options(config).get("weight_block_size") or ()
    shapes, weights = {}, []
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - safe_open is no mapping
                tensor = file.get_slice(key)
                shapes[key] = tensor.get_shape()
                # Scales may be in F8_E8M0.
                if tensor.get_dtype() in ("F8_E4M3", "F8_E5M2"):
                    weights.append(key)
    for key in weights:
        scales = next((shapes[other] for other in _scale_names(key) if other in shapes), None)
        if scales is None:
            raise DataError(f"{name} holds {key} in fp8, and no scales of it. Download the files of {name} again.")
        for size, count, length in zip(shapes[key][-2:], scales[-2:], block):
            shape = f"{tuple(shapes[key])} in fp8, with scales {tuple(scales)} for blocks of {length}"
            if count != -(-size // length):
                raise DataError(f"{name} holds {key} of shape {shape}: they do not fit. Download its files again.")
            if count > 1 and size % length:
                raise UnsupportedModelError(
                    f"{name} holds {key} of shape {shape}. The last block is smaller than the others, and transformers "
                    "cannot dequantise it. Give a checkpoint of this model in bf16."
                )


def _options(config: PretrainedConfig) -> dict[str, Any]:
    held = getattr(config, "quantization_config", None) or {}
    return dict(held) if isinstance(held, Mapping) else held.to_dict()


def _scale_names(key: str) -> tuple[str, ...]:
    """Return the names that the scales of a weight may have in a file."""
    prefix = key.removesuffix("weight")
    return f"{key}_scale_inv", f"{key}_scale", f"{prefix}scale", f"{prefix}qscale_weight"
