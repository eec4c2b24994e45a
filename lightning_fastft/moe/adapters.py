"""LoRA on stacks of expert weights as two thin grouped GEMMs, with PEFT's names, files and methods unchanged.

PEFT materialises ``weight + scale * lhs @ rhs`` for the whole stack twice in each forward. Here the experts function
reads the two factors from the wrapper.

Axes: E experts, I input columns, O output columns, R adapter rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper as PeftParamWrapper
from torch import nn

from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher, share_state
from lightning_fastft.moe.expert_axis import find_axis
from lightning_fastft.moe.expert_linears import ExpertAdapter

# Attribute of experts modules, not in the state_dict: parameter name -> the wrapper around the parameter.
WRAPPERS_ATTRIBUTE = "fastft_expert_wrappers"
# Attribute of PEFT's wrappers: the LowPrecisionAdapters that keep copies of their factors.
COPIES_ATTRIBUTE = "fastft_expert_copies"


class ParamWrapper(PeftParamWrapper):
    """PEFT's LoRA on a stack of expert weights; the experts function reads the factors without a copy of the stack.

    The class has the name of PEFT's class, because PEFT finds its wrappers by name when adapters are added.
    """

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Call the wrapped module, or PEFT's own forward if there is not exactly one plain adapter.

        Raises:
            UnsupportedModelError: PEFT's own forward would need experts that other ranks own.
        """
        if self.plain_adapter() is None:
            if not self.disable_adapters and find_axis(self.get_base_layer()) is not None:
                raise UnsupportedModelError(
                    f"{self.parameter_name} has adapters that PEFT computes from the whole stack (several, merged, or "
                    "a variant), and expert_parallel holds a share of it. Use one plain adapter, or expert_parallel=1."
                )
            return super().forward(x, *args, **kwargs)
        self._check_forward_args(x, *args, **kwargs)
        return self.base_layer(x, *args, **kwargs)

    def plain_adapter(self) -> str | None:
        """Return the only active adapter, neither merged nor disabled; None if PEFT's own forward must run."""
        if self.disable_adapters or self.merged or self.num_experts == 1:
            return None
        names = [name for name in self.active_adapters if name in self.lora_A]
        return names[0] if len(names) == 1 else None

    def factors(self, name: str) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Return lhs, rhs and scale of an adapter: ``weight + scale * lhs @ rhs`` in the layout of the stack.

        lhs and rhs are (E, ., .) views of PEFT's weights.

        The expert is the slowest axis of A and the fastest of B.
        """
        a_ERI = self.lora_A[name].weight.view(self.num_experts, -1, self.in_features)
        b_EOR = self.lora_B[name].weight.view(self.out_features, -1, self.num_experts).permute(2, 0, 1)
        scale = float(self.scaling[name])
        if self._did_swap_in_out_features:
            return b_EOR, a_ERI, scale
        return a_ERI.transpose(1, 2), b_EOR.transpose(1, 2), scale


def install_expert_adapters(model: nn.Module, patcher: ModelPatcher, *, experts: Sequence[nn.Module]) -> int:
    """Make PEFT's wrappers around expert stacks provide their factors.

    It supports exactly one active adapter that is neither merged nor disabled; otherwise PEFT's own forward runs.

    Returns:
        The number of swapped wrappers.

    Cost:
        Host work once; no copy of a weight.
    """
    found: dict[int, list[tuple[str, PeftParamWrapper]]] = {id(module): [] for module in experts}
    for name, module in model.named_modules():
        if type(module) is PeftParamWrapper and id(module.get_base_layer()) in found:
            found[id(module.get_base_layer())].append((name, module))
    num_swapped = 0
    for module in experts:
        wrappers = found[id(module)]
        # Two wrappers around one stack need PEFT's own forward.
        if not wrappers or len({wrapper.parameter_name for _, wrapper in wrappers}) < len(wrappers):
            continue
        swapped = {wrapper.parameter_name: share_state(wrapper, ParamWrapper) for _, wrapper in wrappers}
        for name, wrapper in wrappers:
            patcher.replace_module(model, name, swapped[wrapper.parameter_name])
        patcher.set_attribute(module, WRAPPERS_ATTRIBUTE, swapped)
        num_swapped += len(wrappers)
    return num_swapped


def find_adapter(experts: nn.Module, name: str, *, is_transposed: bool, dtype: torch.dtype) -> ExpertAdapter | None:
    """Return the adapter on a stack of an experts module; None without one, or if PEFT's own forward must run.

    is_transposed: the stack is stored as (E, I, O) instead of (E, O, I).

    Cost:
        Views, and updates of missing or stale low-precision copies.
    """
    wrappers: Mapping[str, ParamWrapper] = vars(experts).get(WRAPPERS_ATTRIBUTE, {})
    wrapper = wrappers.get(name)
    active = None if wrapper is None else wrapper.plain_adapter()
    if wrapper is None or active is None:
        return None
    lhs, rhs, scale = wrapper.factors(active)
    adapters: Any = vars(wrapper).get(COPIES_ATTRIBUTE)
    found = None if adapters is None or adapters.compute_dtype is not dtype else adapters.read_experts(wrapper, active)
    # lhs @ rhs has the layout of the stack: our A is the factor on the side of the input columns.
    is_a_in_front = is_transposed != wrapper._did_swap_in_out_features
    copies: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if found is not None:
        copies = found if is_a_in_front else (found[1], found[0])
    if is_transposed:
        return ExpertAdapter(lhs, rhs, scale, *copies)
    return ExpertAdapter(rhs.transpose(1, 2), lhs.transpose(1, 2), scale, *copies)
