"""Initialisations of adapters that change the base, or need more of it than PEFT's get_peft_model has.

PiSSA and OLoRA take a part of each base weight into the adapter: training computes with ``W - s * B0 @ A0``. Saved
adapters are converted to plain LoRA of twice the rank, ``[B, -B0] @ [A; A0]``, which fits the original base.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from lightning_fastft.core.errors import OptionError, ResumeError, list_names

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig, PeftModel
    from peft.tuners.lora import LoraLayer

    from lightning_fastft.hf.loading.source import ModelSource

ADAPTER = "default"
# Initialisations that PEFT computes from the base alone, and that change it.
_CHANGES_BASE = ("pissa", "olora")
_NEEDS_PREPARATION = {"corda": "preprocess_corda", "lora_ga": "preprocess_loraga"}
# Rows of B0 @ A0 that a checkpoint keeps of each layer, and how far those of another machine may be away.
_NUM_PROBED, _TOLERANCE = 8, 1e-3


class Initial(NamedTuple):
    """Factors of the first adapters of a base that their initialisation changed, in fp32 on the host.

    Args:
        factors: A0 and B0, by the name of the parameter; for adapters of embeddings, which these initialisations do not
            change, zeros of the same shape.
        scales: Scale of each changed layer, by its name.
    """

    factors: dict[str, torch.Tensor]
    scales: dict[str, float]

    def layers(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, float]]:
        """Yield the name of each layer, A0, B0 and the scale."""
        for name, scale in self.scales.items():
            yield (
                name,
                self.factors[f"{name}.lora_A.{ADAPTER}.weight"],
                self.factors[f"{name}.lora_B.{ADAPTER}.weight"],
                scale,
            )


def changes_base(lora: PeftConfig | None) -> bool:
    """Return whether the initialisation of a configuration changes base weights."""
    return str(getattr(lora, "init_lora_weights", True)).lower().startswith(_CHANGES_BASE)


def check_initialisation(
    lora: LoraConfig | None, *, quantization: str | None, adapter_dtype: torch.dtype, source: ModelSource | None
) -> None:
    """Refuse an initialisation that would be wrong, or that PEFT would skip without a word.

    Raises:
        OptionError: The message names the initialisation and what to use instead.
    """
    if lora is None or isinstance(lora.init_lora_weights, bool):
        return
    name, said = str(lora.init_lora_weights), f"lora.init_lora_weights={lora.init_lora_weights!r}"
    if name in _NEEDS_PREPARATION:
        raise OptionError(
            f"{said} needs peft's {_NEEDS_PREPARATION[name]} on data before the adapters are made, which FineTuner "
            "does not run. Use 'eva', 'pissa' or 'olora'."
        )
    if name == "mica":
        raise OptionError(f"{said} is not supported: its frozen factors are in no checkpoint. Use 'pissa' or 'olora'.")
    if quantization is not None and (changes_base(lora) or name == "orthogonal"):
        raise OptionError(
            f"{said} needs a base that is not quantised, and quantization={quantization!r} was given. Use 'loftq', or "
            "remove quantization."
        )
    if changes_base(lora) and adapter_dtype is not torch.float32:
        raise OptionError(
            f"{said} moves the largest part of the weights into the adapters, which adapter_dtype="
            f"{str(adapter_dtype).removeprefix('torch.')!r} would round. Use adapter_dtype='float32'."
        )
    if name == "loftq":
        _check_loftq(lora, quantization=quantization, source=source)
    if name == "eva" and lora.use_dora:
        raise OptionError(f"{said} with use_dora is not supported. Remove one of them.")


def _check_loftq(lora: LoraConfig, *, quantization: str | None, source: ModelSource | None) -> None:
    config: Mapping[str, Any] = lora.loftq_config or {}
    iterations, bits = config.get("loftq_iter", 1), config.get("loftq_bits", 4)
    if quantization != "nf4" or source is None or source.init == "random":
        raise OptionError(
            "lora.init_lora_weights='loftq' compares the NF4 base with the weights of its files: give the name or "
            "folder of a model and quantization='nf4'."
        )
    if (iterations, bits) != (1, 4) or lora.use_dora:
        raise OptionError(
            "LoftQ is one step on NF4 here, so that the adapters fit the usual NF4 base: use loftq_iter 1, loftq_bits "
            f"4 and no use_dora, got {iterations}, {bits} and {lora.use_dora}."
        )


def read_initial(model: PeftModel) -> Initial:
    """Return the adapters of a model whose initialisation has just changed its base.

    Raises:
        OptionError: The change is not exact: a base weight is quantised, or another layer shares it, or PEFT computes
            the initialisation of this kind of layer wrongly.

    Cost:
        One copy of the adapters in host memory.
    """
    factors, scales = {}, {}
    said = f"lora.init_lora_weights={model.peft_config[ADAPTER].init_lora_weights!r}"
    owners = _count_owners(model)
    for name, layer in _lora_layers(model):
        weight, shown = layer.get_base_layer().weight, name.removeprefix("base_model.model.")
        if not weight.is_floating_point():
            raise OptionError(
                f"{shown} is quantised, and {said} needs a base that is not. Give the model that was not quantised."
            )
        if len(owners[id(weight)]) > 1:
            others = list_names([owner for owner in owners[id(weight)] if owner != shown])
            raise OptionError(
                f"{said} moves a part of the weight of {shown} into its adapter, and {others} has the same weight, "
                "which would lose that part. Remove such layers from target_modules, or use init_lora_weights=True."
            )
        if said.endswith("='olora'") and getattr(layer, "fan_in_fan_out", False):
            raise OptionError(
                f"{said} is wrong for {shown} (Conv1D), whose weight has swapped axes: PEFT would change another part "
                "of it than the adapter holds. Use init_lora_weights='pissa'."
            )
        scales[name] = float(layer.scaling[ADAPTER])
        for kind, factor in (("lora_A", layer.lora_A[ADAPTER]), ("lora_B", layer.lora_B[ADAPTER])):
            factors[f"{name}.{kind}.{ADAPTER}.weight"] = factor.weight.detach().float().cpu().clone()
    for name, factor in model.named_parameters():
        if name.endswith((f".lora_embedding_A.{ADAPTER}", f".lora_embedding_B.{ADAPTER}")):
            factors[name] = torch.zeros(()).expand(factor.shape)
    return Initial(factors, scales)


def _count_owners(model: nn.Module) -> dict[int, list[str]]:
    """Return the names of the layers that hold each parameter of the base, by its id."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0].removesuffix(".base_layer").removeprefix("base_model.model.")
        owners.setdefault(id(parameter), []).append(owner)
    return owners


def _lora_layers(model: nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and ADAPTER in module.lora_A:
            yield name, module


def probe_initial(initial: Initial | None) -> dict[str, list[float]]:
    """Return a few numbers of each ``B0 @ A0``, which do not depend on the signs of singular vectors."""
    if initial is None:
        return {}
    return {
        name: (b_NR[:_NUM_PROBED] @ (a_RD @ torch.arange(a_RD.shape[1], dtype=torch.float32).cos())).tolist()
        for name, a_RD, b_NR, _ in initial.layers()
    }


def check_initial(saved: Mapping[str, list[float]], *, initial: Initial) -> None:
    """Check that the base was changed as in the run that wrote a checkpoint.

    Raises:
        ResumeError: The initialisation gave other factors.
    """
    for name, numbers in probe_initial(initial).items():
        found, expected = torch.tensor(numbers), torch.tensor(saved.get(name, []))
        if found.shape != expected.shape or not (found - expected).norm() <= _TOLERANCE * expected.norm():
            raise ResumeError(
                f"The initialisation of {name} took another part of the base into the adapter than in the run of the "
                "checkpoint. A randomised one (pissa_niter_N) follows the kind of device: resume on that kind, or use "
                "the lora settings of that run."
            )


def convert_state(state: Mapping[str, torch.Tensor], *, initial: Initial) -> dict[str, torch.Tensor]:
    """Return a state of adapters as plain LoRA on the original base: twice the rank, in fp32.

    Source:
        PEFT's subtract_mutated_init, the same factors in the same order.
    """
    converted = dict(state)
    for name, first in initial.factors.items():
        last, is_a = state[name].detach().float().cpu(), ".lora_A." in name or ".lora_embedding_A." in name
        converted[name] = torch.cat([last, first]) if is_a else torch.cat([last, -first], dim=1)
    return converted


def convert_config(lora: LoraConfig) -> LoraConfig:
    """Return the configuration of converted adapters: twice each rank, and the same scales."""
    lora = copy.deepcopy(lora)
    growth = math.sqrt(2) if lora.use_rslora else 2
    lora.init_lora_weights = True
    lora.r *= 2
    lora.lora_alpha *= growth  # type: ignore[assignment]
    lora.rank_pattern = {key: 2 * rank for key, rank in (lora.rank_pattern or {}).items()}
    lora.alpha_pattern = {key: growth * alpha for key, alpha in (lora.alpha_pattern or {}).items()}
    return lora


def restore_base(model: PeftModel, *, initial: Initial) -> None:
    """Add what the initialisation took from the base weights back to them, up to the rounding of their dtype."""
    layers = dict(_lora_layers(model))
    with torch.no_grad():
        for name, a_RD, b_NR, scale in initial.layers():
            weight = layers[name].get_base_layer().weight
            taken = (scale * (b_NR @ a_RD)).to(weight.device)
            # The weight of a Conv1D has swapped axes.
            weight.copy_(weight.float() + (taken.T if getattr(layers[name], "fan_in_fan_out", False) else taken))


def as_plain_lora(model: PeftModel, *, initial: Initial) -> PeftModel:
    """Return trained adapters as plain LoRA on the restored base; the model given cannot be used afterwards."""
    from peft import get_peft_model

    state = convert_state(dict(model.named_parameters()), initial=initial)
    lora = convert_config(model.peft_config[ADAPTER])  # type: ignore[arg-type]
    restore_base(model, initial=initial)
    base: Any = model.unload()
    plain = get_peft_model(base, lora)
    plain.load_state_dict({name: tensor for name, tensor in state.items() if f".{ADAPTER}" in name}, strict=False)
    return plain.eval()  # type: ignore[return-value]


def initialise_loftq(model: PeftModel, source: ModelSource) -> None:
    """Set each adapter to the best approximation of what NF4 loses of its base weight, by one SVD.

    Raises:
        OptionError: The files do not hold a weight under the name of its layer.

    Cost:
        One more read of the adapted weights, and one SVD each, on the device of the layer.

    Source:
        LoftQ, arXiv 2310.08659, with one step; as peft.replace_lora_weights_loftq, which ignores the scale: B is
        divided by it here.
    """
    import bitsandbytes as bnb
    from safetensors import safe_open

    from lightning_fastft.hf.loading.source import weight_files

    places: dict[str, str] = {}
    for path in weight_files(source):
        with safe_open(path, framework="pt") as file:
            places.update(dict.fromkeys(file.keys(), str(path)))
    prefix = f"{getattr(model.get_base_model(), 'base_model_prefix', '')}."
    for name, layer in _lora_layers(model):
        quantised = layer.get_base_layer().weight
        key = f"{name.removeprefix('base_model.model.')}.weight"
        key = key if key in places else key.removeprefix(prefix)
        if key not in places or not hasattr(quantised, "quant_state"):
            raise OptionError(
                f"LoftQ finds no weight {key} in the files, or the layer is not in NF4. Name other target_modules, or "
                "use init_lora_weights=True."
            )
        with safe_open(places[key], framework="pt") as file, torch.no_grad():
            weight = file.get_tensor(key).to(device=quantised.device, dtype=torch.float32)
            lost = weight - bnb.functional.dequantize_4bit(quantised.data, quantised.quant_state).float()
            u, s, v = torch.linalg.svd(lost, full_matrices=False)
            rank, root = layer.r[ADAPTER], s[: layer.r[ADAPTER]].sqrt()
            layer.lora_A[ADAPTER].weight.copy_(root[:, None] * v[:rank])
            layer.lora_B[ADAPTER].weight.copy_(u[:, :rank] * root / layer.scaling[ADAPTER])
