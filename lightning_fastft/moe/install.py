"""Find mixture-of-experts layers of transformers models and run them on grouped GEMMs."""

from __future__ import annotations

import copy
import re
import sys
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher, share_state
from lightning_fastft.core.status import Status
from lightning_fastft.hf.expert_nf4 import stack_names
from lightning_fastft.hf.families import decoder_layers, find_causal_models, find_decoder, is_on_interface
from lightning_fastft.kernels.expert_gate.reference import GateForm
from lightning_fastft.moe.adapters import install_expert_adapters
from lightning_fastft.moe.fp8_experts import Fp8Experts
from lightning_fastft.moe.interface import (
    FORM_ATTRIBUTE,
    NAME,
    check_weight,
    grouped_backends,
    recognise_gate,
    register_experts,
)

STATUS_NAME = "expert router"

_LLAMA4 = "Llama4TextMoe"
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NUM_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
_EXPERTS_NAME = re.compile(r"(?:^|_)experts?$")
_EXPERTS_CLASS = re.compile(r"Experts?(?![a-z])")


def find_experts(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the MoE layers that BincountRouter supports, with their dotted names.

    These are the experts modules that use transformers' ExpertsInterface in each causal language model, and Llama 4's
    ``Llama4TextMoe``.

    Args:
        root: Any module: a model, a PEFT model, a LightningModule around them.

    Returns:
        Names below root and modules, in the order of the model.

    Example:
        >>> find_experts(nn.Linear(2, 2))
        []
    """
    found: list[tuple[str, nn.Module]] = []
    for prefix, model in find_causal_models(root):
        found += [(f"{prefix}.{name}" if prefix else name, module) for name, module in _find_in(model)]
    return found


def install_bincount_router(root: nn.Module, patcher: ModelPatcher) -> list[Status]:
    """Run every MoE layer of root with one stable sort, one count and grouped GEMMs.

    Only these instances change: another model with the same configuration object keeps its experts. Routers, recorded
    logits, the auxiliary loss, parameters and state-dict keys do not change. Until the patcher undoes this,
    ``set_experts_implementation`` does not affect the experts. root may be any module around a model.

    Returns:
        One status "expert router" per model: active, or inactive if the model has no MoE layers.

    Raises:
        UnsupportedModelError: A model has MoE layers of unknown classes only, or a layer with a gate, dtype or
            placement that cannot be computed exactly. Nothing is changed.

    Cost:
        Host work once per run; no device work.
    """
    models = find_causal_models(root)
    if not models:
        return [Status(STATUS_NAME, "inactive", f"{type(root).__name__} holds no transformers model")]
    plans = [(name, model, _check(model)) for name, model in models]
    register_experts()
    statuses = []
    for name, model, layers in plans:
        for layer in layers:
            _swap(model, layer, patcher)
        status = _describe(
            model,
            layers,
            num_adapted=install_expert_adapters(
                model, patcher, experts=[_inner_experts(layer.module) for layer in layers]
            ),
        )
        # If root contains several models, the status names the model.
        statuses.append(status._replace(name=f"{STATUS_NAME} ({name})") if len(models) > 1 else status)
    return statuses


def install_fp8_experts(root: nn.Module, patcher: ModelPatcher, *, is_emulated: bool) -> list[Fp8Experts]:
    """Compute the products of frozen expert weights of every model inside root in fp8, where BincountRouter runs them.

    is_emulated computes in plain PyTorch, on any device.

    Returns:
        One ``Fp8Experts`` per model with MoE layers.
    """
    found = []
    for _, model in find_causal_models(root):
        layers = [
            (layer, [_inner_experts(module) for module in layer.modules() if _is_moe(module)])
            for layer in decoder_layers(model)
        ]
        if any(modules for _, modules in layers):
            found.append(Fp8Experts(layers, is_routed=_is_routed, is_emulated=is_emulated))
            found[-1].install(patcher)
    return found


class _Layer(NamedTuple):
    """A MoE layer: name, module to swap, module with the stacks, and gate form."""

    name: str
    module: nn.Module
    experts: Any
    form: GateForm


def _find_in(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if _is_moe(module)]


def _is_routed(experts: nn.Module) -> bool:
    return FORM_ATTRIBUTE in vars(experts)


def _is_moe(module: nn.Module) -> bool:
    return is_on_interface(module) or _is_llama4(module)


def _is_llama4(module: nn.Module) -> bool:
    # Compare by name: the module of Llama 4 is imported only for a model that has its layers.
    return any(cls.__name__ == _LLAMA4 for cls in type(module).__mro__)


def _inner_experts(module: nn.Module) -> Any:
    """Return the module with the stacks: inside adapters in Llama 4, else the module itself."""
    if not _is_llama4(module):
        return module
    experts: Any = module.experts
    while hasattr(experts, "base_layer"):
        experts = experts.base_layer
    return experts


def _check(model: PreTrainedModel) -> list[_Layer]:
    """Return the MoE layers of a model; raise on unsupported layers before anything changes."""
    found = _find_in(model)
    title = f"{type(model).__name__} ({model.config.model_type})"
    evidence = "" if found else _evidence_of_experts(model)
    if evidence:
        raise UnsupportedModelError(
            f"{title} has MoE layers ({evidence}), but none that BincountRouter supports: none uses transformers' "
            "ExpertsInterface. Remove BincountRouter for this model."
        )
    layers = []
    for name, module in found:
        experts = _inner_experts(module)
        try:
            for weight_name in stack_names(experts):
                check_weight(experts, weight_name, getattr(experts, weight_name))
            if _is_llama4(module) and "forward" in {*vars(module), *vars(experts)}:
                raise UnsupportedModelError("its forward was replaced on this instance, so a swap would not be called")
            layers.append(_Layer(name, module, experts, recognise_gate(experts)))
        except UnsupportedModelError as error:
            raise UnsupportedModelError(
                f"{title}, {name}: {error}. Remove BincountRouter to train it with transformers' own experts."
            ) from error
    return layers


def _swap(model: PreTrainedModel, layer: _Layer, patcher: ModelPatcher) -> None:
    patcher.set_attribute(layer.experts, FORM_ATTRIBUTE, layer.form)
    if not _is_llama4(layer.module):
        # Another model may share the configuration, so these experts get a copy.
        config = copy.copy(layer.experts.config)
        config._experts_implementation_internal = NAME
        patcher.set_attribute(layer.experts, "config", config)
        return
    from lightning_fastft.moe.llama4 import RoutedLlama4Experts, RoutedLlama4Moe

    if not isinstance(layer.module, RoutedLlama4Moe):
        name = next(path for path, part in layer.module.named_modules() if part is layer.experts)
        patcher.replace_module(layer.module, name, share_state(layer.experts, RoutedLlama4Experts))
        patcher.replace_module(model, layer.name, share_state(layer.module, RoutedLlama4Moe))


def _describe(model: PreTrainedModel, layers: list[_Layer], *, num_adapted: int) -> Status:
    if not layers:
        return Status(STATUS_NAME, "inactive", f"no MoE layers in {type(model).__name__} ({model.config.model_type})")
    config = model.config.get_text_config(decoder=True)
    num_experts = "/".join(str(count) for count in sorted({int(layer.experts.num_experts) for layer in layers}))
    num_chosen = _first(config, _NUM_CHOSEN)
    chosen = f", {num_chosen} per token" if num_chosen else ""
    picks = sorted({pick for layer in layers for pick in grouped_backends(layer.experts)})
    reason = (
        f"{len(layers)} MoE layers ({num_experts} experts{chosen}), {config.model_type}; grouped GEMM: "
        f"{', '.join(picks)}"
    )
    if num_adapted:
        reason += f"; adapters on {num_adapted} stacks"
    others = _unsupported_experts(model, [layer.module for layer in layers])
    if others:
        return Status(
            STATUS_NAME,
            "active",
            f"{reason}; not swapped: {', '.join(others)}",
            "These experts do not use transformers' ExpertsInterface.",
        )
    return Status(STATUS_NAME, "active", reason)


def _evidence_of_experts(model: PreTrainedModel) -> str:
    """Return the evidence of MoE layers: experts in the configuration, or modules that look like experts."""
    config = model.config.get_text_config(decoder=True)
    # A family whose experts are supported has none if all its layers are dense.
    for name in () if _has_supported_experts(model) else _NUM_EXPERTS:
        count = getattr(config, name, None)
        # Some families configure experts while their MoE layers are disabled.
        if isinstance(count, int) and count > 1 and getattr(config, "is_moe", True):
            return f"{name}={count} in its configuration"
    unsupported = _unsupported_experts(model, [])
    return f"modules {', '.join(unsupported)}" if unsupported else ""


def _has_supported_experts(model: PreTrainedModel) -> bool:
    """Return whether the module that defines the decoder of a model also defines MoE layers that are supported."""
    home = type(find_decoder(model)).__module__
    kinds = [kind for kind in vars(sys.modules[home]).values() if isinstance(kind, type) and kind.__module__ == home]
    return any(hasattr(kind, "_apply_gate") or kind.__name__ == _LLAMA4 for kind in kinds)


def _unsupported_experts(model: PreTrainedModel, known: list[nn.Module]) -> list[str]:
    """Return the classes of modules outside the known layers that look like routed experts."""
    inside = {id(part) for module in known for part in module.modules()}
    unsupported = {
        type(module).__name__
        for name, module in model.named_modules()
        if id(module) not in inside and "shared" not in name and _looks_like_experts(name.rpartition(".")[2], module)
    }
    return sorted(unsupported)


def _looks_like_experts(name: str, module: nn.Module) -> bool:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return len(module) > 1 and _EXPERTS_NAME.search(name) is not None
    has_stack = any(parameter.ndim == 3 for parameter in module.parameters(recurse=False))
    return has_stack and (
        _EXPERTS_CLASS.search(type(module).__name__) is not None or _EXPERTS_NAME.search(name) is not None
    )


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)
