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
from torch.distributed.tensor import DTensor

from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher, share_state
from lightning_fastft.moe.expert_axis import find_axis
from lightning_fastft.moe.expert_linears import ExpertAdapter
from lightning_fastft.moe.low_precision_copy import LowPrecisionCopy

# Attribute of experts modules, not in the state_dict: parameter name -> the wrapper around the parameter.
WRAPPERS_ATTRIBUTE = "fastft_expert_wrappers"
# Attribute of PEFT's wrappers: the LowPrecisionExpertAdapters that keeps copies of their factors; of lora_A and lora_B:
# the copy.
_COPIES_ATTRIBUTE = "fastft_expert_copies"
FACTOR_ATTRIBUTE = "fastft_expert_factor"


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


class LowPrecisionExpertAdapters:
    """Keep low-precision copies of adapters on experts, in the layout of grouped GEMMs, equal to their masters.

    A copy is made in the first forward that needs it, and again when the version counter or address of its master has
    changed. A change of a master that alters neither needs ``refresh``.

    Args:
        compute_dtype: Dtype of the copies; stacks in another dtype get no copies.
    """

    def __init__(self, compute_dtype: torch.dtype) -> None:
        self.compute_dtype = compute_dtype
        self._wrappers: list[PeftParamWrapper] = []
        self._is_sharded = False

    def __len__(self) -> int:
        """Return the number of copies."""
        return len(self._copies())

    def watch(self, model: nn.Module, patcher: ModelPatcher) -> None:
        """Attach to every wrapper around a stack, including wrappers that are swapped later.

        Undoing the patcher drops the copies. Sharded masters get none.
        """
        self._wrappers = [module for module in model.modules() if isinstance(module, PeftParamWrapper)]
        self._is_sharded = any(isinstance(linear.weight, DTensor) for linear in self._linears())
        for wrapper in self._wrappers:
            patcher.set_attribute(wrapper, _COPIES_ATTRIBUTE, self)
        if self._wrappers:
            patcher.add_undo(self._drop)

    def refresh(self) -> None:
        """Copy every master into its low-precision copy.

        Cost:
            One foreach copy over all first factors and one launch per second factor: reads masters, writes copies; no
            host sync.
        """
        copies = [copy for copy in self._copies() if copy.is_copy_of(copy.master, self.compute_dtype)]
        plain = [copy for copy in copies if not copy.is_expert_last]
        if plain:
            with torch.no_grad():
                torch._foreach_copy_([copy.tensor for copy in plain], [copy.master_view() for copy in plain])
        for copy in copies:
            if copy.is_expert_last:
                copy.copy_master()
            else:
                copy.mark()

    def read(self, wrapper: PeftParamWrapper, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return current copies of lora_A and lora_B of an adapter as (E, R, columns); None if the masters have the
        compute dtype or are sharded.
        """
        linears = (wrapper.lora_A[name], wrapper.lora_B[name])
        # A sharded master is gathered for each pass, so no version counter tells whether a copy is stale.
        if self._is_sharded or all(linear.weight.dtype is self.compute_dtype for linear in linears):
            return None
        a, b = (
            self._read(linear, wrapper.num_experts, is_expert_last=is_last)
            for linear, is_last in zip(linears, (False, True))
        )
        return a, b

    def _read(self, linear: nn.Linear, num_experts: int, *, is_expert_last: bool) -> torch.Tensor:
        copy: LowPrecisionCopy | None = vars(linear).get(FACTOR_ATTRIBUTE)
        if copy is None or not copy.is_copy_of(linear.weight, self.compute_dtype):
            copy = LowPrecisionCopy(
                linear.weight, self.compute_dtype, num_experts=num_experts, is_expert_last=is_expert_last
            )
            setattr(linear, FACTOR_ATTRIBUTE, copy)
        elif not copy.is_current():
            copy.copy_master()
        return copy.tensor

    def _linears(self) -> list[nn.Linear]:
        return [linear for wrapper in self._wrappers for linear in (*wrapper.lora_A.values(), *wrapper.lora_B.values())]

    def _copies(self) -> list[LowPrecisionCopy]:
        return [vars(linear)[FACTOR_ATTRIBUTE] for linear in self._linears() if FACTOR_ATTRIBUTE in vars(linear)]

    def _drop(self) -> None:
        for linear in self._linears():
            vars(linear).pop(FACTOR_ATTRIBUTE, None)
        self._wrappers.clear()


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
    adapters: LowPrecisionExpertAdapters | None = vars(wrapper).get(_COPIES_ATTRIBUTE)
    found = None if adapters is None or adapters.compute_dtype is not dtype else adapters.read(wrapper, active)
    # lhs @ rhs has the layout of the stack: our A is the factor on the side of the input columns.
    is_a_in_front = is_transposed != wrapper._did_swap_in_out_features
    copies: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if found is not None:
        copies = found if is_a_in_front else (found[1], found[0])
    if is_transposed:
        return ExpertAdapter(lhs, rhs, scale, *copies)
    return ExpertAdapter(rhs.transpose(1, 2), lhs.transpose(1, 2), scale, *copies)
