"""Read saved adapters back with stock PEFT, without the base in memory, and check them for vLLM."""

from __future__ import annotations

import copy
import math
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_fastft.core.errors import CheckpointNotSavedError, UnsupportedModelError, list_names
from lightning_fastft.hf.lora import tuner_layers, without_pattern_warning

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from peft import LoraConfig, PeftModel

# Parts of the names of what PEFT saves with an adapter.
_PARTS = (".lora_", ".modules_to_save.", ".trainable_tokens_delta.")
# What PEFT's wrappers put between the name of a layer and its own weight.
_WRAPPED = re.compile(r"\.(token_adapter\.base_layer|base_layer|original_module)(?=\.)")
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# Values of max_lora_rank in vllm.config.lora.
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Fields of an adapter's configuration that vLLM rejects or ignores, and the values that it can serve.
_VLLM_IGNORES: dict[str, tuple[Any, ...]] = {
    "modules_to_save": (None, []),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "bias": ("none", None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "target_parameters": (None, [], set()),
}


def check_read_back(
    model: PeftModel,
    folder: Path,
    *,
    adapter: str = "default",
    state_dict: Mapping[str, torch.Tensor] | None = None,
) -> int:
    """Compare an adapter of a folder, as stock PEFT reads it, with the model; return the number of tensors.

    PEFT loads it onto a base without memory with the same code as onto a real base. Every tensor must have its name
    and value, copies of whole modules and rows of tokens too, and every layer its scale.

    Raises:
        CheckpointNotSavedError: An adapter is missing, or has another value or scale.

    Cost:
        One more copy of the adapters in host memory; no second base.
    """
    from peft import PeftModel
    from safetensors import safe_open

    with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as file:
        keys = list(file.keys())
    bare = _build_bare(model.get_base_model(), keys=keys)
    with without_pattern_warning(bare, model.peft_config[adapter]), warnings.catch_warnings():
        # The head of a reward model is excluded, and the base without memory has none.
        warnings.filterwarnings("ignore", message="You have passed exclude_modules=", category=UserWarning)
        again = PeftModel.from_pretrained(bare, str(folder), adapter_name=adapter, torch_device="cpu")
    held = dict(model.named_parameters()) if state_dict is None else state_dict
    found = dict(again.named_parameters())
    expected = {
        name: tensor for name, tensor in held.items() if f".{adapter}" in name and any(part in name for part in _PARTS)
    }
    num_written = sum(".lora_" in key for key in keys)
    num_factors = sum(".lora_" in name for name in expected)
    # Trained biases and resized embeddings of the base have the same names in the file.
    expected |= {key: held[key] for key in keys if key in held}
    wrong = [] if num_written == num_factors else [f"{num_written} of {num_factors} tensors"]
    wrong += [name for name, tensor in expected.items() if name not in found or not _is_equal(found[name], tensor)]
    scales = _scales(again, adapter)
    # Doubled ranks and scales of rsLoRA may differ in the last bit.
    wrong += [
        name
        for name, scale in _scales(model, adapter).items()
        if not math.isclose(scales.get(name, math.nan), scale, rel_tol=1e-12)
    ]
    if wrong or not expected:
        raise CheckpointNotSavedError(
            f"{folder} was not written: stock PEFT reads other values than were saved: {list_names(sorted(wrong))}."
        )
    return len(expected)


def _build_bare(base: Any, *, keys: Collection[str]) -> nn.Module:
    """Return a base of the same structure on the CPU, whose weights are expanded single numbers; tied ones stay tied.

    Biases, and weights of layers of which the file holds the base's weight, are whole: they are copied into them.
    """
    with torch.device("meta"):
        bare: nn.Module = type(base)(copy.deepcopy(base.config))
    owners = {_WRAPPED.sub("", key.removeprefix("base_model.model.")).rpartition(".")[0] for key in keys}
    shared: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for module_name, module in bare.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                shared.setdefault(id(parameter), []).append((module_name, module, name))
    for places in shared.values():
        _, module, name = places[0]
        parameter = module._parameters[name]
        assert parameter is not None
        is_whole = any("bias" in name or module_name in owners for module_name, _, name in places)
        size = parameter.shape if is_whole else ()
        values = torch.zeros(size, dtype=parameter.dtype).expand(parameter.shape)
        replaced = nn.Parameter(values, requires_grad=False)
        for _, module, name in places:
            module._parameters[name] = replaced
    return bare


def _is_equal(found: torch.Tensor, saved: torch.Tensor) -> bool:
    """Return whether a tensor that PEFT read, possibly in a wider dtype, has the saved values."""
    return found.shape == saved.shape and torch.equal(found.detach().to(saved.dtype), saved.detach().cpu())


def _scales(model: nn.Module, adapter: str) -> dict[str, float]:
    """Return the scale of an adapter in each layer, keyed by name."""
    layers = {id(layer) for layer in tuner_layers(model)}
    return {
        name: float(module.scaling[adapter])  # type: ignore[index]
        for name, module in model.named_modules()
        if id(module) in layers and adapter in getattr(module, "scaling", {})
    }


def check_for_vllm(model: PeftModel, *, is_doubled: bool = False) -> int:
    """Raise on adapters that vLLM would reject or partly ignore; return the rank to serve them with.

    vLLM reads ``r``, ``lora_alpha``, ``use_rslora`` and the tensors ``...lora_A.weight`` and ``...lora_B.weight`` of
    linear layers, with one rank and one scale for all. It rejects DoRA and ``modules_to_save``, ignores unknown fields
    of the configuration (including rank_pattern, alpha_pattern and target_parameters), and does not support biases of
    adapters. PEFT's adapters of expert stacks (``target_parameters``) have transposed axes.

    Args:
        model: The model with its adapters.
        is_doubled: Whether the adapters are written as plain LoRA of twice their rank (PiSSA, OLoRA).

    Raises:
        UnsupportedModelError: vLLM would not read a part; the message names it.

    Source:
        docs.vllm.ai, vllm.lora.peft_helper (fields and refusals), vllm.lora.utils (names of tensors) and
        vllm.config.lora (ranks), v0.10 to v0.22; expert stacks: vllm-project/vllm pull requests 41384 and 52194.
    """
    lora: LoraConfig = next(iter(model.peft_config.values()))  # type: ignore[assignment]
    ignored = [
        f"{field}={getattr(lora, field)!r:.60}"
        for field, served in _VLLM_IGNORES.items()
        if hasattr(lora, field) and getattr(lora, field) not in served
    ]
    if isinstance(lora.target_modules, str):
        ignored.append(f"target_modules={lora.target_modules!r:.60}, which is not a list of names")
    num_ranks = 2 * lora.r if is_doubled else lora.r
    if num_ranks > VLLM_RANKS[-1]:
        ignored.append(f"r={num_ranks}, more than {VLLM_RANKS[-1]}")
    strange = [
        name
        for name, parameter in model.named_parameters()
        if "lora_" in name and not any(f".{part}." in name for part in ("lora_A", "lora_B")) and parameter.requires_grad
    ]
    if strange:
        ignored.append(f"the tensors {list_names(strange)}")
    if ignored:
        raise UnsupportedModelError(
            f"vLLM would not read all of these adapters: {'; '.join(ignored)}. Add --merge and serve the merged model, "
            "or train without it."
        )
    return next(rank for rank in VLLM_RANKS if rank >= num_ranks)
