"""LoRA on stacks of expert weights as two thin grouped products: a swap of PEFT's wrappers that changes no name, file or method of PEFT.

PEFT writes ``weight + scale * lhs @ rhs`` for the whole stack, twice in each forward. Here the experts function asks the wrapper for its two factors.

Axes: E experts, I input columns, O output columns, R adapter rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper as PeftParamWrapper
from torch import nn

from lightning_fastft.models.swap import SwapLedger, share_state
from lightning_fastft.moe.experts import ExpertAdapter

# A plain attribute of experts modules, so no state_dict has it: parameter name -> the wrapper around it.
WRAPPERS_ATTRIBUTE = "fastft_expert_wrappers"


class ParamWrapper(PeftParamWrapper):
    """PEFT's LoRA on one stack of expert weights; the stack is never written anew, the experts function reads the factors instead.

    It has PEFT's own name, by which PEFT finds its wrappers when adapters are added.
    """

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401 - PEFT's signature
        """Hand over to what is wrapped, or run PEFT's own forward for what is not one plain adapter."""
        if self.plain_adapter() is None:
            return super().forward(x, *args, **kwargs)
        self._check_forward_args(x, *args, **kwargs)
        return self.base_layer(x, *args, **kwargs)

    def plain_adapter(self) -> str | None:
        """Return the one adapter that is active, neither merged nor disabled; None where PEFT's own forward must run."""
        if self.disable_adapters or self.merged or self.num_experts == 1:
            return None
        names = [name for name in self.active_adapters if name in self.lora_A]
        return names[0] if len(names) == 1 else None

    def factors(self, name: str) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Return lhs, rhs and scale of an adapter: ``weight + scale * lhs @ rhs`` as the stack is stored, both (E, ., .) views of PEFT's weights.

        The expert is the slowest axis of A and the fastest of B.
        """
        a_ERI = self.lora_A[name].weight.view(self.num_experts, -1, self.in_features)
        b_EOR = self.lora_B[name].weight.view(self.out_features, -1, self.num_experts).permute(2, 0, 1)
        scale = float(self.scaling[name])
        if self._did_swap_in_out_features:
            return b_EOR, a_ERI, scale
        return a_ERI.transpose(1, 2), b_EOR.transpose(1, 2), scale


def install_expert_adapters(model: nn.Module, ledger: SwapLedger, *, experts: Sequence[nn.Module]) -> int:
    """Let PEFT's wrappers around the stacks of these experts hand over their factors.

    Adapters are served for exactly one active adapter that is neither merged nor disabled; anything else runs PEFT's own forward.

    Args:
        model: A PEFT model, or a module around one.
        ledger: Where the swaps are written down.
        experts: Modules whose experts function is ours.

    Returns:
        How many wrappers were swapped.

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
        # Two wrappers around one stack add up, which PEFT's own forward does.
        if not wrappers or len({wrapper.parameter_name for _, wrapper in wrappers}) < len(wrappers):
            continue
        swapped = {wrapper.parameter_name: share_state(wrapper, ParamWrapper) for _, wrapper in wrappers}
        for name, wrapper in wrappers:
            ledger.replace_module(model, name, swapped[wrapper.parameter_name])
        ledger.set_attribute(module, WRAPPERS_ATTRIBUTE, swapped)
        num_swapped += len(wrappers)
    return num_swapped


def find_adapter(experts: nn.Module, name: str, *, is_transposed: bool) -> ExpertAdapter | None:
    """Return the adapter on one stack of an experts module; None where there is none, or PEFT's own forward has to serve it.

    Args:
        experts: The module that holds the stack.
        name: The stack's name in it.
        is_transposed: The stack is stored as (E, I, O), and not as (E, O, I).
    """
    wrappers: Mapping[str, ParamWrapper] = vars(experts).get(WRAPPERS_ATTRIBUTE, {})
    wrapper = wrappers.get(name)
    active = None if wrapper is None else wrapper.plain_adapter()
    if wrapper is None or active is None:
        return None
    lhs, rhs, scale = wrapper.factors(active)
    return ExpertAdapter(lhs, rhs, scale) if is_transposed else ExpertAdapter(rhs.transpose(1, 2), lhs.transpose(1, 2), scale)
