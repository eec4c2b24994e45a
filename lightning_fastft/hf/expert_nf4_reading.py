"""Load a checkpoint with linear layers and experts in NF4; each tensor is quantised as soon as it is loaded.

transformers quantises linear layers while it loads them, but not stacks of experts. The quantizer registered here does
both, so peak memory is the quantised model plus one dense stack. It keeps the largest magnitude of every dense tensor,
because quantisation on CUDA hides a NaN.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_fastft.hf.expert_nf4 import check_experts, is_stack, quantise_experts
from lightning_fastft.hf.expert_nf4_tensor import quantise_stack
from lightning_fastft.hf.loading.finite_weights import largest_magnitude

if TYPE_CHECKING:
    import torch
    from transformers import BitsAndBytesConfig, PreTrainedModel

METHOD = "fastft_nf4"
# Attribute of the configuration until a quantizer is made from it.
_DEVICE = "fastft_device"


def quantise_experts_too(config: BitsAndBytesConfig, *, device: torch.device | None = None) -> BitsAndBytesConfig:
    """Return a configuration for ``from_pretrained`` that quantises linear layers like config, and experts to NF4.

    The loaded model reports bitsandbytes as its quantization method.

    Args:
        config: transformers' configuration of NF4 with double quantisation; it is not changed.
        device: Device that quantises each tensor; the result returns to the device that the tensor was read to. None
            to quantise it where it was read to.

    Returns:
        The value for ``quantization_config``. ``from_pretrained`` raises the UnsupportedModelError of quantise_experts
        before it reads weights. ``largest`` of the model's ``hf_quantizer`` has the largest magnitude (fp32) of each
        weight before it was quantised, by name.

    Cost:
        Peak memory of loading is the quantised model plus one dense stack; with another device, that device holds one
        tensor at a time.

    Source:
        transformers.quantizers.register_quantizer.

    Example:
        >>> from transformers import BitsAndBytesConfig
        >>> quantise_experts_too(BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")).quant_method
        'fastft_nf4'
    """
    _register()
    config = copy.deepcopy(config)
    config.quant_method = METHOD
    setattr(config, _DEVICE, device)
    return config


@functools.cache
def _register() -> None:
    """Register the quantizer with transformers, once per process."""
    from transformers.integrations.bitsandbytes import Bnb4bitQuantize
    from transformers.quantizers import register_quantizer
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
    from transformers.quantizers.quantizers_utils import get_module_from_name
    from transformers.utils.quantization_config import QuantizationMethod

    class QuantiseBoth(Bnb4bitQuantize):
        def convert(self, input_dict: dict[str, Any], *args: Any, model: nn.Module, **kwargs: Any) -> dict[str, Any]:
            read = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
            weights = {name: weight.to(self.hf_quantizer.device or weight.device) for name, weight in read.items()}
            self.hf_quantizer.largest.update((name, largest_magnitude(weight)) for name, weight in weights.items())
            stacks = {name for name in weights if is_stack(*get_module_from_name(model, name))}
            others = {name: weight for name, weight in weights.items() if name not in stacks}
            result = super().convert(others, *args, model=model, **kwargs)
            result = {name: weight.to(read[name].device) for name, weight in result.items()}
            for name in stacks:
                stack = quantise_stack(weights[name]).to(read[name].device)
                result[name] = nn.Parameter(stack, requires_grad=False)
            return result

    class ExpertQuantizer(Bnb4BitHfQuantizer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            # The configuration is saved with the model.
            self.device: torch.device | None = self.quantization_config.__dict__.pop(_DEVICE, None)
            self.largest: dict[str, torch.Tensor] = {}

        def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
            return is_stack(*get_module_from_name(model, param_name)) or super().param_needs_quantization(
                model, param_name, **kwargs
            )

        def get_quantize_ops(self) -> QuantiseBoth:
            return QuantiseBoth(self)

        def _process_model_before_weight_loading(self, model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
            check_experts(model)
            super()._process_model_before_weight_loading(model, *args, **kwargs)

        def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
            model = super()._process_model_after_weight_loading(model, **kwargs)
            quantise_experts(model)
            # The model now equals a model from bitsandbytes' own quantizer.
            self.quantization_config.quant_method = model.quantization_method = QuantizationMethod.BITS_AND_BYTES
            return model

    register_quantizer(METHOD)(ExpertQuantizer)
