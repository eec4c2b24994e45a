"""The experts of one layer on routed tokens: one stable sort, one count, grouped products, and a hand-written backward.

Axes: T tokens, K experts per token, N = T * K routed slots, E experts, D model width, F expert width, P = 2 F columns
    of gate and up, I input columns, O output columns, R adapter rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lightning_fastft.activations.segments import Session
from lightning_fastft.core.checks import check_int, check_tensor
from lightning_fastft.core.errors import ShapeError
from lightning_fastft.core.once_differentiable import once_differentiable
from lightning_fastft.kernels.expert_gate.op import gate_backward, gate_forward
from lightning_fastft.kernels.expert_gate.reference import GateForm
from lightning_fastft.kernels.expert_rows.op import combine_rows
from lightning_fastft.kernels.expert_sort.op import sort_by_expert
from lightning_fastft.kernels.grouped_mm.reference import GatheredRows
from lightning_fastft.kernels.launch import aligned_rows
from lightning_fastft.kernels.lora_linear.op import wide_product
from lightning_fastft.moe.expert_linears import (
    CastLinear,
    ExpertLinear,
    cast_linear,
    check_copies,
    wanted_gradients,
)

if TYPE_CHECKING:
    from lightning_fastft.moe.fp8_experts import Fp8Stack

# Number of parameters of one product, in the argument order of the Function.
_PER_LINEAR = 4
# The last of these are the factors of an adapter.
_NUM_FACTORS = 2
_FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class ExpertPoint(NamedTuple):
    """Checkpointing session of the decoder layer, and the name of the experts in it.

    A plan may keep the first product there instead of recomputing it.
    """

    session: Session
    name: str

    @property
    def first(self) -> str:
        """Return the name of the first product, which can be kept."""
        return f"{self.name}.gate_up"

    @property
    def last(self) -> str:
        """Return the name of the second product and the sum after it, whose output no backward reads."""
        return f"{self.name}.down"


def run_experts(
    x_TD: torch.Tensor,
    expert_TK: torch.Tensor,
    weight_TK: torch.Tensor,
    *,
    gate_up: ExpertLinear,
    down: ExpertLinear,
    form: GateForm,
    num_experts: int,
    has_gate: bool = True,
    point: ExpertPoint | None = None,
) -> torch.Tensor:
    """Return the weighted sum of the outputs of each token's experts.

    ``y[t] = sum over k of weight[t, k] * (gate(x[t] @ gate_up[e]) @ down[e])`` with ``e = expert[t, k]``. Slots with an
    id outside [0, num_experts) (sentinels of expert parallelism) contribute nothing. Two runs are bit-equal.

    Args:
        x_TD: Token states. Shape (T, D); bf16, fp16, fp32 or, on a CPU, float64; last axis contiguous.
        expert_TK: Experts of each token. Shape (T, K); int64 or int32.
        weight_TK: Routing weights of the experts. Shape (T, K); any floating dtype.
        gate_up: First product, D to 2 F columns (to F without a gate).
        down: Second product, F to D columns.
        form: Activation between the two.
        num_experts: Number of experts, E.
        has_gate: False if the first product has no gate: the activation of its columns is the input of the second.
        point: Checkpointing session that may keep values; None outside activation checkpointing.

    Returns:
        y_TD: Shape, dtype and device of x_TD; with gradients for x_TD, weight_TK and every parameter that requires one.

    Raises:
        ShapeError: Shapes, dtypes, devices or layouts do not match.

    Cost:
        Forward 2 N (D P + F D) FLOP and six passes over rows; backward the same for the inputs, and again for trained
        weights. Saved for the backward: x_TD, N x P values, the order and the routing weights. No copy of a weight
        stack. Without low-precision copies one pass over the adapters each way. No host sync on CUDA.

    Source:
        Routing by one sort: Unsloth and NVIDIA, as published. Gradient of the routing weights without experts' outputs:
        SonicMoE, arXiv 2512.14080.

    Example:
        >>> identity = ExpertLinear(torch.eye(2).repeat(2, 1, 1))
        >>> first = ExpertLinear(torch.cat([torch.eye(2), torch.eye(2)], dim=1).repeat(2, 1, 1))
        >>> x, expert, weight = torch.tensor([[0.0, 100.0]]), torch.tensor([[1]]), torch.tensor([[0.5]])
        >>> run_experts(x, expert, weight, gate_up=first, down=identity, form=GateForm(), num_experts=2)
        tensor([[   0., 5000.]])
    """
    check_tensor("x_TD", x_TD, ndim=2, dtypes=_FLOATING)
    check_int("num_experts", num_experts, low=1)
    if expert_TK.shape != weight_TK.shape or expert_TK.ndim != 2 or expert_TK.shape[0] != x_TD.shape[0]:
        raise ShapeError(
            f"expert_TK has shape {tuple(expert_TK.shape)}, weight_TK {tuple(weight_TK.shape)} and x_TD "
            f"{tuple(x_TD.shape)}; the first two must be "
            "equal, with a row per token."
        )
    for name, linear in (("gate_up", gate_up), ("down", down)):
        check_copies(name, linear.adapter, dtype=x_TD.dtype)
    call = _Call(
        expert_TK,
        num_experts,
        form,
        has_gate,
        (gate_up.scale, down.scale),
        (gate_up.fp8, down.fp8),
        point,
    )
    tensors = (*gate_up.tensors, *down.tensors, *gate_up.copies, *down.copies)
    if point is None:
        return _RoutedExperts.apply(call, x_TD, weight_TK, *tensors)
    return point.session.run_last(
        point.last,
        lambda: _RoutedExperts.apply(call, x_TD, weight_TK, *tensors),
        full=lambda: _RoutedExperts.apply(call._replace(point=None), x_TD, weight_TK, *tensors),
    )


class _Call(NamedTuple):
    """Arguments that are not differentiated."""

    expert_TK: torch.Tensor
    num_experts: int
    form: GateForm
    has_gate: bool
    scales: tuple[float, float]
    fp8: tuple[Fp8Stack | None, Fp8Stack | None]
    point: ExpertPoint | None


class _RoutedExperts(torch.autograd.Function):
    """Run the experts of one layer.

    It saves x_TD, the first product, the order, the routing weights, and trained parameters or their low-precision
    copies. The backward recomputes the activation from the first product. No gradient needs the experts' outputs.
    Products gather their rows by slot, so x_TD is not copied in expert order.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        x_TD: torch.Tensor,
        weight_TK: torch.Tensor,
        *tensors: torch.Tensor | None,
    ) -> torch.Tensor:
        parameters, copies = tensors[: 2 * _PER_LINEAR], tensors[2 * _PER_LINEAR :]
        read = _read_tensors(parameters, copies)
        first, second = _cast_linears(read, call, dtype=x_TD.dtype)
        order = sort_by_expert(call.expert_TK, num_experts=call.num_experts)

        def first_product() -> tuple[torch.Tensor, ...]:
            return first.product(GatheredRows(x_TD, order.slot_N, call.expert_TK.shape[1]), order.end_E)

        point = call.point
        held = first_product() if point is None else point.session.value(point.first, first_product)
        needs = ctx.needs_input_grad[-len(tensors) :]
        ctx.call, ctx.num_held = call, len(held)
        ctx.wanted = wanted_gradients(parameters[:_PER_LINEAR]) + wanted_gradients(parameters[_PER_LINEAR:])
        # Low-precision copies change with each optimizer step, so autograd checks their versions like those of trained
        # parameters.
        ctx.is_watched = [
            needs_it or tensor is not parameter for needs_it, tensor, parameter in zip(needs, read, parameters)
        ]
        ctx.frozen = [None if is_watched else tensor for is_watched, tensor in zip(ctx.is_watched, read)]
        watched = [tensor for is_watched, tensor in zip(ctx.is_watched, read) if is_watched]
        ctx.save_for_backward(x_TD, weight_TK, *order, *held, *watched)
        if point is not None and point.session.is_last(point.last):
            return x_TD.new_full((1,), float("nan")).expand(x_TD.shape)
        columns_NP = _with_gate(held[0], has_gate=call.has_gate)
        act_NF = gate_forward(columns_NP, form=call.form, end_E=order.end_E, is_checked=False)
        y_ND, *_ = second.product(act_NF, order.end_E)
        return combine_rows(y_ND, order.place_TK, order.end_E, weight_TK=weight_TK, is_checked=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_TD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        # Read once: activation checkpointing allows only one access to saved tensors.
        x_TD, weight_TK, slot_N, place_TK, end_E, *others = ctx.saved_tensors
        (gate_up_NP, *low_1), watched = others[: ctx.num_held], iter(others[ctx.num_held :])
        needs_x, needs_weight, *needs = ctx.needs_input_grad[1 : 3 + 2 * _PER_LINEAR]
        read = [next(watched) if is_watched else frozen for is_watched, frozen in zip(ctx.is_watched, ctx.frozen)]
        first, second = _cast_linears(read, call, dtype=x_TD.dtype)
        num_chosen = weight_TK.shape[1]
        weight_N = weight_TK.reshape(-1).index_select(0, slot_N)

        d_y_ND = GatheredRows(aligned_rows(d_y_TD), slot_N, num_chosen)
        d_act_NF, d_low_2 = second.input_gradient(d_y_ND, end_E)
        d_gate_up_NP, act_NF, d_weight_N = gate_backward(
            d_act_NF,
            _with_gate(gate_up_NP, has_gate=call.has_gate),
            form=call.form,
            weight_N=weight_N,
            need_act=any(needs[_PER_LINEAR:]),
            end_E=end_E,
            is_checked=False,
        )
        if not call.has_gate:
            d_gate_up_NP = d_gate_up_NP[:, : gate_up_NP.shape[1]]
        del d_act_NF, gate_up_NP
        d_first: list[torch.Tensor | None] = [None] * _PER_LINEAR
        d_second = d_first
        if act_NF is not None:
            d_second = second.parameter_gradients(
                act_NF, d_y_ND, end_E, low_NR=None, d_low_NR=d_low_2, weight_N=weight_N,
                needs=needs[_PER_LINEAR:], wanted=ctx.wanted[_PER_LINEAR:],
            )  # fmt: skip
        del d_y_ND, act_NF

        d_x_ND, d_low_1 = first.input_gradient(d_gate_up_NP, end_E)
        d_x_TD = combine_rows(d_x_ND, place_TK, end_E, is_checked=False) if needs_x else None
        del d_x_ND
        if any(needs[:_PER_LINEAR]):
            x_ND = GatheredRows(x_TD, slot_N, num_chosen)
            d_first = first.parameter_gradients(
                x_ND, d_gate_up_NP, end_E, low_NR=low_1[0] if low_1 else None, d_low_NR=d_low_1,
                needs=needs[:_PER_LINEAR], wanted=ctx.wanted[:_PER_LINEAR],
            )  # fmt: skip
        d_weight_TK = None
        if needs_weight:
            assert d_weight_N is not None
            d_weight_TK = _routing_gradient(d_weight_N, d_y_TD, call, second.bias_EO, place_TK, end_E).to(
                weight_TK.dtype
            )
        return None, d_x_TD, d_weight_TK, *d_first, *d_second, *[None] * (2 * _NUM_FACTORS)


def _read_tensors(
    parameters: Sequence[torch.Tensor | None], copies: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Return the tensors that the products read: the parameters, or low-precision copies of the factors."""
    read = list(parameters)
    for start, factors in ((_PER_LINEAR, copies[:_NUM_FACTORS]), (2 * _PER_LINEAR, copies[_NUM_FACTORS:])):
        if factors[0] is not None:
            read[start - _NUM_FACTORS : start] = factors
    return read


def _cast_linears(
    read: Sequence[torch.Tensor | None], call: _Call, *, dtype: torch.dtype
) -> tuple[CastLinear, CastLinear]:
    first, second = (
        cast_linear(*read[start : start + _PER_LINEAR], scale=scale, fp8=fp8, dtype=dtype)
        for start, scale, fp8 in zip((0, _PER_LINEAR), call.scales, call.fp8)
    )
    return first, second


def _routing_gradient(
    d_weight_N: torch.Tensor,
    d_y_TD: torch.Tensor,
    call: _Call,
    bias_ED: torch.Tensor | None,
    place_TK: torch.Tensor,
    end_E: torch.Tensor,
) -> torch.Tensor:
    """Return the gradient of the routing weights, given its part without the bias in sorted order; 0 for sentinels."""
    d_weight_TK = d_weight_N.index_select(0, place_TK.reshape(-1)).view(place_TK.shape)
    if bias_ED is not None:
        # The bias of all experts takes one dense product: E columns are fewer than the D columns of each slot.
        score_TE = wide_product(d_y_TD, bias_ED.T, dtype=d_weight_N.dtype)
        d_weight_TK = d_weight_TK + score_TE.gather(1, call.expert_TK.clamp(0, call.num_experts - 1).long())
    return torch.where(place_TK < end_E[-1], d_weight_TK, 0.0)


def _with_gate(columns_NP: torch.Tensor, *, has_gate: bool) -> torch.Tensor:
    """Return the columns of gate and up; without a gate the up half is 1."""
    return columns_NP if has_gate else torch.cat([columns_NP, torch.ones_like(columns_NP)], dim=1)
