"""Read weights, adapters and gate of transformers' experts modules, and run them as an experts function.

Axes: T tokens, K experts per token, N = T * K routed slots, E experts, D model width, F expert width, P columns of gate
    and up, I input columns, O output columns, R adapter rank.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.integrations.moe import ExpertsInterface, _default_apply_gate

from lightning_fastft.activations.segments import unwatched
from lightning_fastft.activations.values import find_session, value_name
from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.hf.activation_functions import activation_name
from lightning_fastft.hf.expert_nf4 import QuantisedWeight, read_nf4, stack_names
from lightning_fastft.kernels.expert_gate.reference import GateForm, gate_forward
from lightning_fastft.kernels.grouped_mm.choice import choose_backend
from lightning_fastft.kernels.grouped_mm.reference import GatheredRows
from lightning_fastft.moe.adapters import find_adapter
from lightning_fastft.moe.expert_axis import find_axis, share_adapter
from lightning_fastft.moe.expert_linears import ExpertLinear, dense_weight
from lightning_fastft.moe.fp8_experts import read_fp8
from lightning_fastft.moe.routing import ExpertPoint, run_experts

NAME = "fastft"
# Instance attribute, not in the state_dict: the recognised gate form.
FORM_ATTRIBUTE = "fastft_gate_form"

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Classes whose own _apply_gate is known: whether gate and up columns alternate, and the attributes with the limit and
# alpha of the clamps.
_CLAMPED = MappingProxyType(
    {
        "GptOssExperts": (True, "limit", "alpha"),
        "OpenAIPrivacyFilterExperts": (False, "limit", "alpha"),
        "MiniMaxM3VLExperts": (False, "swiglu_limit", "swiglu_alpha"),
    }
)
# The same formula as the default, in fp32.
_WIDE_DEFAULT = ("BeamExperts",)
# Equal formulas differ only by rounding, far less than this. The closest different formulas, the two GELUs, differ by
# 1e-4.
_PROBE_TOLERANCE = 1e-5


def register_experts() -> None:
    """Register ``experts_implementation="fastft"`` with transformers; idempotent.

    Example:
        >>> register_experts()
        >>> "fastft" in ExpertsInterface()
        True
    """
    ExpertsInterface.register(NAME, fastft_experts_forward)


def fastft_experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Run the routed experts of a layer, as ``experts_implementation="fastft"``.

    One stable sort and one count order the slots by expert. Slots with ids of ``num_experts`` or above contribute
    nothing.

    Args:
        self: The experts module, passed by transformers.
        hidden_states: Token states. Shape (T, D).
        top_k_index: Experts of each token. Shape (T, K); int64 or int32.
        top_k_weights: Routing weights of the experts. Shape (T, K); any floating dtype.

    Returns:
        Weighted sum of the experts' outputs, shape and dtype of hidden_states.

    Raises:
        UnsupportedModelError: The gate formula of the experts is unknown, their weights are quantised in another form
            than NF4, or sharded without being gathered for this call.

    Cost:
        The cost of run_experts; no host sync.
    """
    if not getattr(self, "has_post_expert_norm", False):
        return run_module(self, hidden_states, top_k_index, top_k_weights)
    # A norm between the second GEMM and the routing weights needs the output of every slot.
    num_tokens, num_experts_per_token = top_k_index.shape
    x_ND = hidden_states.repeat_interleave(num_experts_per_token, dim=0)
    y_ND = self.post_expert_norm(run_slots(self, x_ND, top_k_index.reshape(-1)))
    weight_TK = top_k_weights.masked_fill(top_k_index >= self.num_experts, 0.0)
    y_TKD = y_ND.view(num_tokens, num_experts_per_token, -1) * weight_TK[..., None]
    return y_TKD.sum(dim=1).to(hidden_states.dtype)


def run_slots(module: nn.Module, x_ND: torch.Tensor, expert_N: torch.Tensor) -> torch.Tensor:
    """Return the unweighted output of one expert for each row, by treating slots as tokens with one expert."""
    ones_N1 = torch.ones((x_ND.shape[0], 1), dtype=torch.float32, device=x_ND.device)
    return run_module(module, x_ND, expert_N[:, None], ones_N1)


def run_module(module: nn.Module, x_TD: torch.Tensor, expert_TK: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
    """Pass the weights of an experts module to run_experts; with expert parallelism, those of this rank's experts and
    the tokens of all ranks of the axis.
    """
    session, axis = find_session(module), find_axis(module)
    with unwatched(session):
        gate_up, down = (read_linear(module, name) for name in stack_names(module))
        num_experts = int(module.num_experts)  # type: ignore[arg-type]
        # Like transformers' grouped GEMMs, ours ignore autocast and compute in the dtype of the weights. Owned experts
        # may be fp32 masters, which each product casts.
        dtype = gate_up.weight_EIO.dtype if axis is None else x_TD.dtype
        routed = x_TD.to(dtype), expert_TK, weight_TK
        if axis is not None:
            routed, num_experts = axis.gather(*routed, num_experts=num_experts), num_experts // axis.size
        y_TD = run_experts(
            *routed,
            gate_up=gate_up,
            down=down,
            form=gate_form(module),
            num_experts=num_experts,
            has_gate=bool(getattr(module, "has_gate", True)),
            point=None if session is None else ExpertPoint(session, value_name(module)),
        )
        if axis is not None:
            y_TD = axis.scatter(y_TD, num_tokens=x_TD.shape[0])
        return y_TD.to(x_TD.dtype)


def grouped_backends(module: nn.Module) -> set[str]:
    """Return the backend of grouped GEMMs for the stacks of a module on their device, without adapters."""
    picks = set()
    for name in stack_names(module):
        weight, bias = _read_stack(module, name, is_gathered=False)
        weight_EIO = dense_weight(weight)
        x_TI = weight_EIO.new_empty((1, weight_EIO.shape[1]))
        # Only the first product gathers its rows.
        slot_N = weight_EIO.new_empty(1, dtype=torch.int64)
        rows = x_TI if name == "down_proj" else GatheredRows(x_TI, slot_N, 1)
        picks.add(choose_backend(rows, weight_EIO, has_addend=bias is not None))
    return picks


def read_linear(module: nn.Module, name: str) -> ExpertLinear:
    """Return a linear of an experts module: its weight as (E, I, O), its bias, its PEFT adapter, and the weight in
    fp8 if it computes so.

    Raises:
        UnsupportedModelError: The weight is sharded, and neither gathered nor owned by this rank.

    Cost:
        Views. PEFT copies the stack if several adapters are active. Stale low-precision copies are updated.
    """
    weight, bias = _read_stack(module, name)
    adapter = find_adapter(module, name, is_transposed=bool(getattr(module, "is_transposed", True)), dtype=weight.dtype)
    axis = find_axis(module)
    if adapter is not None and axis is not None:
        adapter = share_adapter(adapter, axis)
    return ExpertLinear(weight, bias, adapter, read_fp8(module, name))


def _read_stack(
    module: nn.Module, name: str, *, is_gathered: bool = True
) -> tuple[torch.Tensor | QuantisedWeight, torch.Tensor | None]:
    """Return the weight of one product as (E, I, O), and its bias; of sharded experts this rank's part if they are
    owned, or if they are not gathered yet.
    """
    # If PEFT has computed weight plus adapter as one stack, use that stack.
    weight: torch.Tensor = getattr(module, name)
    is_transposed = bool(getattr(module, "is_transposed", True))
    bias = getattr(module, f"{name}_bias") if getattr(module, "has_bias", False) else None
    if find_axis(module) is not None or not is_gathered:
        # Through autograd, unlike local_values: owned experts can be trained.
        weight = weight.to_local() if isinstance(weight, DTensor) else weight
        bias = bias.to_local() if isinstance(bias, DTensor) else bias
    if isinstance(weight, DTensor):
        raise UnsupportedModelError(
            f"experts are sharded: {type(module).__name__}.{name} is a DTensor that no FSDP module gathered for this "
            "call. Train with strategy='fastft_fsdp', which shards whole decoder layers, or remove BincountRouter."
        )
    check_weight(module, name, weight)
    packed = read_nf4(module, name, weight)
    if packed is not None:
        return packed, bias
    return weight if is_transposed else weight.transpose(1, 2), bias


def check_weight(module: nn.Module, name: str, weight: torch.Tensor) -> None:
    """Raise on a stack of expert weights that grouped GEMMs cannot read.

    Raises:
        UnsupportedModelError: Names the class, the weight and the reason.
    """
    if weight.dtype not in _DTYPES or weight.ndim != 3:
        raise UnsupportedModelError(
            f"{type(module).__name__}.{name} is {tuple(weight.shape)} in {weight.dtype}; it must be (E, ., .) in bf16, "
            "fp16 or fp32. Load the model dequantised."
        )


def gate_form(module: nn.Module) -> GateForm:
    """Return the gate between both GEMMs of an experts module, recognised once and checked numerically.

    Raises:
        UnsupportedModelError: The formula is unknown; it is never guessed.

    Cost:
        A few CPU operations on the first call of an instance.
    """
    known: GateForm | None = vars(module).get(FORM_ATTRIBUTE)
    if known is None:
        known = recognise_gate(module)
        setattr(module, FORM_ATTRIBUTE, known)
    return known


def recognise_gate(module: nn.Module) -> GateForm:
    """Return the gate of an experts module from its class and activation, and check it.

    Raises:
        UnsupportedModelError: The class or its gate is unknown.
    """
    owner = _gate_owner(module)
    if owner in _CLAMPED:
        is_interleaved, limit, alpha = _CLAMPED[owner]
        form = GateForm(is_interleaved, "clamped", float(getattr(module, limit)), float(getattr(module, alpha)))
    elif not owner or owner in _WIDE_DEFAULT:
        form = GateForm(activation=activation_name(module))
    else:
        raise UnsupportedModelError(f"{owner}._apply_gate is an unknown formula")
    if form.is_interleaved == getattr(module, "is_concatenated", True) or not _agrees(module, form):
        raise UnsupportedModelError(
            f"the gate of {type(module).__name__} does not match its class: {form} gives other numbers"
        )
    return form


def _gate_owner(module: nn.Module) -> str:
    """Return the class that overrides the gate; empty for the default gate, no gate, or another interface."""
    if not getattr(module, "has_gate", True):
        return ""
    for cls in type(module).__mro__:
        function = vars(cls).get("_apply_gate")
        if function is not None:
            return "" if function is _default_apply_gate else cls.__name__
    return ""


def _agrees(module: Any, form: GateForm) -> bool:
    """Return whether the form matches the module's own code numerically, on both sides of every clamp."""
    reach = 1.5 * form.limit if form.activation == "clamped" and math.isfinite(form.limit) else 10.0
    generator = torch.Generator(device="cpu").manual_seed(0)
    with torch.no_grad(), torch.device("cpu"):
        probe_NP = (torch.rand(256, 6, generator=generator) * 2 - 1) * reach
        if not getattr(module, "has_gate", True):
            theirs, probe_NP = module.act_fn(probe_NP), torch.cat((probe_NP, torch.ones_like(probe_NP)), dim=1)
        elif hasattr(type(module), "_apply_gate"):
            theirs = module._apply_gate(probe_NP)
        else:
            gate_NF, up_NF = probe_NP.chunk(2, dim=-1)
            theirs = module.act_fn(gate_NF) * up_NF
        ours = gate_forward(probe_NP, form=form)
    return bool(torch.allclose(ours, theirs, rtol=_PROBE_TOLERANCE, atol=_PROBE_TOLERANCE))
