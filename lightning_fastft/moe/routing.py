"""The experts of one layer on routed tokens: one stable sort, one count, grouped products, and a hand-written backward.

Axes: T tokens, K experts per token, N = T * K routed slots, E experts, D model width, F expert width, P = 2 F columns
    of gate and up, I input columns, O output columns, R adapter rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.function import once_differentiable

from lightning_fastft.activations.segments import Session
from lightning_fastft.core.checks import check_int, check_tensor
from lightning_fastft.core.errors import ShapeError
from lightning_fastft.kernels.expert_gate.op import gate_backward, gate_forward
from lightning_fastft.kernels.expert_gate.reference import GateForm
from lightning_fastft.kernels.expert_pack.op import exchange_ends
from lightning_fastft.kernels.expert_rows.op import combine_rows
from lightning_fastft.kernels.expert_sort.op import sort_by_expert
from lightning_fastft.kernels.grouped_mm.op import grouped_mm, grouped_weight_grad
from lightning_fastft.kernels.grouped_mm.reference import GatheredRows, Rows, rows_of

_FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Number of parameters of one product, in the argument order of the Function.
_PER_LINEAR = 4
# The last of these are the factors of an adapter.
_NUM_FACTORS = 2


class ExpertAdapter(NamedTuple):
    """LoRA on a stack of expert weights: ``x @ weight[e] + scale * (x @ a[e]) @ b[e]``.

    Without low-precision copies each pass casts and transposes the factors. With copies the factors are not read and
    only receive gradients, in their own dtype. Autograd raises if a copy changes between forward and backward.

    Args:
        a_EIR: Shape (E, I, R); any floating dtype (the product runs in the dtype of the tokens); any view.
        b_ERO: Shape (E, R, O); as a_EIR.
        scale: Factor on the low-rank product.
        copy_a_ERI: a with its last two axes transposed. Shape (E, R, I), contiguous; dtype of the tokens. Given
            together with copy_b_ERO.
        copy_b_ERO: b. Shape (E, R, O), contiguous; dtype of the tokens.
    """

    a_EIR: torch.Tensor
    b_ERO: torch.Tensor
    scale: float
    copy_a_ERI: torch.Tensor | None = None
    copy_b_ERO: torch.Tensor | None = None


class PackedWeight(Protocol):
    """A frozen weight that is dequantised only while a product reads it."""

    dtype: torch.dtype
    device: torch.device
    shape: torch.Size

    def dense(self) -> torch.Tensor:
        """Return the weight as (E, I, O), valid until another packed weight is dequantised."""


class NarrowWeight(Protocol):
    """A frozen weight in a narrow dtype, which products multiply with quantised rows."""

    def product(self, x_NI: Rows, end_E: torch.Tensor, *, is_backward: bool = False, **addend: Any) -> torch.Tensor:
        """Return ``grouped_mm`` of rows and the weight, or its transpose in the backward."""


class ExpertLinear(NamedTuple):
    """One linear of every expert.

    Args:
        weight_EIO: Weight of ``x @ weight[e]``. Shape (E, I, O); any view with a stride of 1 along I or O, or a packed
            weight. A wider dtype than that of the tokens (fp32 masters) is cast for each product; gradients have it.
        bias_EO: Shape (E, O), dtype of the weight; None for none.
        adapter: LoRA on the weight; None for none.
        narrow: The same weight in fp8, frozen, for both products; None to multiply in the dtype of the tokens.
    """

    weight_EIO: torch.Tensor | PackedWeight
    bias_EO: torch.Tensor | None = None
    adapter: ExpertAdapter | None = None
    narrow: NarrowWeight | None = None


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
        _check_copies(name, linear.adapter, dtype=x_TD.dtype)
    call = _Call(
        expert_TK,
        num_experts,
        form,
        has_gate,
        (_scale_of(gate_up), _scale_of(down)),
        (gate_up.narrow, down.narrow),
        point,
    )
    tensors = (*_tensors_of(gate_up), *_tensors_of(down), *_copies_of(gate_up), *_copies_of(down))
    if point is None:
        return _RoutedExperts.apply(call, x_TD, weight_TK, *tensors)
    return point.session.run_last(
        point.last,
        lambda: _RoutedExperts.apply(call, x_TD, weight_TK, *tensors),
        anew=lambda: _RoutedExperts.apply(call._replace(point=None), x_TD, weight_TK, *tensors),
    )


class _Call(NamedTuple):
    """Arguments that are not differentiated."""

    expert_TK: torch.Tensor
    num_experts: int
    form: GateForm
    has_gate: bool
    scales: tuple[float, float]
    narrow: tuple[NarrowWeight | None, NarrowWeight | None]
    point: ExpertPoint | None


class _Linear(NamedTuple):
    """One linear, with contiguous factors in the layouts of the grouped products; all but the weight in the dtype of
    the tokens.
    """

    weight_EIO: torch.Tensor | PackedWeight
    bias_EO: torch.Tensor | None
    a_ERI: torch.Tensor | None
    b_ERO: torch.Tensor | None
    scale: float
    narrow: NarrowWeight | None


class _Wanted(NamedTuple):
    """Dtype and memory order of the gradient of one parameter."""

    dtype: torch.dtype
    is_expert_last: bool = False
    # Stored as (E, O, I).
    is_transposed: bool = False


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
        first, second = _linears(read, call, dtype=x_TD.dtype)
        order = sort_by_expert(call.expert_TK, num_experts=call.num_experts)

        def first_product() -> tuple[torch.Tensor, ...]:
            return _product(GatheredRows(x_TD, order.slot_N, call.expert_TK.shape[1]), first, order.end_E)

        point = call.point
        held = first_product() if point is None else point.session.value(point.first, first_product)
        needs = ctx.needs_input_grad[-len(tensors) :]
        ctx.call, ctx.num_held = call, len(held)
        ctx.wanted = _wanted_gradients(parameters[:_PER_LINEAR]) + _wanted_gradients(parameters[_PER_LINEAR:])
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
        y_ND, *_ = _product(act_NF, second, order.end_E)
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
        first, second = _linears(read, call, dtype=x_TD.dtype)
        num_chosen = weight_TK.shape[1]
        weight_N = weight_TK.reshape(-1).index_select(0, slot_N)

        d_y_ND = GatheredRows(d_y_TD.contiguous(), slot_N, num_chosen)
        d_act_NF, d_low_2 = _input_gradient(d_y_ND, second, end_E)
        gate = gate_backward(
            d_act_NF,
            _with_gate(gate_up_NP, has_gate=call.has_gate),
            form=call.form,
            weight_N=weight_N,
            need_act=any(needs[_PER_LINEAR:]),
            end_E=end_E,
            is_checked=False,
        )
        d_gate_up_NP = gate.d_gate_up_NP if call.has_gate else gate.d_gate_up_NP[:, : gate_up_NP.shape[1]]
        del d_act_NF, gate_up_NP
        d_first: list[torch.Tensor | None] = [None] * _PER_LINEAR
        d_second = d_first
        if gate.act_NF is not None:
            low_2 = (
                None
                if second.a_ERI is None
                else grouped_mm(gate.act_NF, second.a_ERI.transpose(1, 2), end_E, is_checked=False)
            )
            rows = _Rows(gate.act_NF, d_y_ND, low_2, d_low_2, weight_N)
            d_second = _parameter_gradients(
                rows, second, end_E, needs=needs[_PER_LINEAR:], wanted=ctx.wanted[_PER_LINEAR:]
            )
            del rows
        del d_y_ND

        d_x_ND, d_low_1 = _input_gradient(d_gate_up_NP, first, end_E)
        d_x_TD = combine_rows(d_x_ND, place_TK, end_E, is_checked=False) if needs_x else None
        del d_x_ND
        if any(needs[:_PER_LINEAR]):
            rows = _Rows(
                GatheredRows(x_TD, slot_N, num_chosen), d_gate_up_NP, low_1[0] if low_1 else None, d_low_1, None
            )
            d_first = _parameter_gradients(
                rows, first, end_E, needs=needs[:_PER_LINEAR], wanted=ctx.wanted[:_PER_LINEAR]
            )
        d_weight_TK = None
        if needs_weight:
            assert gate.d_weight_N is not None
            d_weight_TK = _routing_gradient(gate.d_weight_N, d_y_TD, call, second.bias_EO, place_TK, end_E).to(
                weight_TK.dtype
            )
        return None, d_x_TD, d_weight_TK, *d_first, *d_second, *[None] * (2 * _NUM_FACTORS)


def _tensors_of(linear: ExpertLinear) -> tuple[torch.Tensor | None, ...]:
    """Return the differentiable tensors of a linear, _PER_LINEAR entries."""
    adapter = linear.adapter
    return (linear.weight_EIO, linear.bias_EO, *((None, None) if adapter is None else (adapter.a_EIR, adapter.b_ERO)))


def _scale_of(linear: ExpertLinear) -> float:
    return 0.0 if linear.adapter is None else linear.adapter.scale


def _copies_of(linear: ExpertLinear) -> tuple[torch.Tensor | None, ...]:
    """Return the low-precision copies as views with the shapes of the factors, _NUM_FACTORS entries."""
    adapter = linear.adapter
    if adapter is None or adapter.copy_a_ERI is None:
        return (None,) * _NUM_FACTORS
    return adapter.copy_a_ERI.transpose(1, 2), adapter.copy_b_ERO


def _check_copies(name: str, adapter: ExpertAdapter | None, *, dtype: torch.dtype) -> None:
    """Raise on low-precision copies that would be cast or copied in each pass, or belong to another adapter."""
    if adapter is None or (adapter.copy_a_ERI is None and adapter.copy_b_ERO is None):
        return
    num_experts, num_inputs, rank = adapter.a_EIR.shape
    expected = {"copy_a_ERI": (num_experts, rank, num_inputs), "copy_b_ERO": tuple(adapter.b_ERO.shape)}
    for factor, copy in zip(expected, (adapter.copy_a_ERI, adapter.copy_b_ERO)):
        if copy is None or tuple(copy.shape) != expected[factor] or copy.dtype is not dtype or not copy.is_contiguous():
            given = "missing" if copy is None else f"{tuple(copy.shape)} in {copy.dtype} with strides {copy.stride()}"
            raise ShapeError(
                f"{factor} of {name} is {given}; it must be {expected[factor]} in {dtype}, contiguous. Give both "
                "low-precision copies or none."
            )


def _read_tensors(
    parameters: Sequence[torch.Tensor | None], copies: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Return the tensors that the products read: the parameters, or low-precision copies of the factors."""
    read = list(parameters)
    for start, factors in ((_PER_LINEAR, copies[:_NUM_FACTORS]), (2 * _PER_LINEAR, copies[_NUM_FACTORS:])):
        if factors[0] is not None:
            read[start - _NUM_FACTORS : start] = factors
    return read


def _linears(read: Sequence[torch.Tensor | None], call: _Call, *, dtype: torch.dtype) -> tuple[_Linear, _Linear]:
    """Return both linears with their factors in dtype.

    Low-precision copies already have this dtype; other factors are cast in each pass and not kept.
    """
    first, second = (
        _cast_linear(*read[start : start + _PER_LINEAR], scale=scale, narrow=narrow, dtype=dtype)
        for start, scale, narrow in zip((0, _PER_LINEAR), call.scales, call.narrow)
    )
    return first, second


def _cast_linear(
    weight_EIO: torch.Tensor | None,
    bias_EO: torch.Tensor | None,
    a_EIR: torch.Tensor | None,
    b_ERO: torch.Tensor | None,
    *,
    scale: float,
    narrow: NarrowWeight | None,
    dtype: torch.dtype,
) -> _Linear:
    assert weight_EIO is not None
    a_ERI = None
    if a_EIR is not None and b_ERO is not None:
        a_ERI, b_ERO = _lay_out(a_EIR.transpose(1, 2), dtype=dtype), _lay_out(b_ERO, dtype=dtype)
    return _Linear(weight_EIO, None if bias_EO is None else bias_EO.to(dtype), a_ERI, b_ERO, scale, narrow)


def _lay_out(factor: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """Return a factor of shape (E, R, columns) in dtype, contiguous; the tensor itself if it is already."""
    if _is_expert_last(factor):
        return exchange_ends(factor.permute(2, 1, 0), dtype=dtype, is_checked=False)
    return factor.to(dtype).contiguous()


def _is_transposed(weight_EIO: torch.Tensor | PackedWeight) -> bool:
    """Return whether the memory order of an (E, I, O) weight is (E, O, I)."""
    is_dense = isinstance(weight_EIO, torch.Tensor) and not weight_EIO.is_contiguous()
    return is_dense and weight_EIO.transpose(1, 2).is_contiguous()  # type: ignore[union-attr]


def _is_expert_last(factor: torch.Tensor) -> bool:
    """Return whether the memory order of an (E, R, columns) factor is (columns, R, E), as in PEFT's second factor."""
    return not factor.is_contiguous() and factor.permute(2, 1, 0).is_contiguous()


def _wanted_gradients(parameters: Sequence[torch.Tensor | None]) -> list[_Wanted | None]:
    """Return dtype and memory order of the gradients of one product's parameters."""
    weight, bias, a_EIR, b_ERO = parameters
    factors = (None if a_EIR is None else a_EIR.transpose(1, 2), b_ERO)
    dense = [
        None if weight is None else _Wanted(weight.dtype, is_transposed=_is_transposed(weight)),
        None if bias is None else _Wanted(bias.dtype),
    ]
    return dense + [
        None if factor is None else _Wanted(factor.dtype, is_expert_last=_is_expert_last(factor)) for factor in factors
    ]


def dense_weight(weight_EIO: torch.Tensor | PackedWeight, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a weight as a dense tensor, valid until the next packed weight is dequantised.

    A weight in another dtype than asked for, an fp32 master, is cast for one product.
    """
    dense = weight_EIO if isinstance(weight_EIO, torch.Tensor) else weight_EIO.dense()
    return dense if dtype is None else dense.to(dtype)


def _product(x_NI: Rows, linear: _Linear, end_E: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the output of one linear, and the adapter's low-rank rows if it has an adapter."""
    if linear.a_ERI is None:
        return (_multiply(x_NI, linear, end_E, bias_EO=linear.bias_EO),)
    low_NR = grouped_mm(x_NI, linear.a_ERI.transpose(1, 2), end_E)
    addend: dict[str, Any] = {"low_NR": low_NR, "low_ERO": linear.b_ERO, "low_scale": linear.scale}
    return _multiply(x_NI, linear, end_E, bias_EO=linear.bias_EO, **addend), low_NR


def _multiply(
    rows: Rows, linear: _Linear, end_E: torch.Tensor, *, is_backward: bool = False, **addend: Any
) -> torch.Tensor:
    """Return the product of rows and a weight, or its transpose, plus the addend."""
    if linear.narrow is not None:
        return linear.narrow.product(rows, end_E, is_backward=is_backward, **addend)
    weight_EIO = dense_weight(linear.weight_EIO, dtype=rows_of(rows).dtype)
    return grouped_mm(
        rows, weight_EIO.transpose(1, 2) if is_backward else weight_EIO, end_E, is_checked=not is_backward, **addend
    )


def _input_gradient(d_NO: Rows, linear: _Linear, end_E: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradient of a product's input, and of the adapter's low-rank rows without its scale."""
    if linear.a_ERI is None or linear.b_ERO is None:
        return _multiply(d_NO, linear, end_E, is_backward=True), None
    d_low_NR = grouped_mm(d_NO, linear.b_ERO.transpose(1, 2), end_E, is_checked=False)
    addend: dict[str, Any] = {"low_NR": d_low_NR, "low_ERO": linear.a_ERI, "low_scale": linear.scale}
    return _multiply(d_NO, linear, end_E, is_backward=True, **addend), d_low_NR


class _Rows(NamedTuple):
    """Rows of one linear in the backward: its input, the gradient of its output, both for the adapter, and the factor
    on the gradient of the output.
    """

    x_NI: Rows
    d_NO: Rows
    low_NR: torch.Tensor | None
    d_low_NR: torch.Tensor | None
    weight_N: torch.Tensor | None


def _parameter_gradients(
    rows: _Rows, linear: _Linear, end_E: torch.Tensor, *, needs: Sequence[bool], wanted: Sequence[_Wanted | None]
) -> list[torch.Tensor | None]:
    """Return the gradients of weight, bias, A and B of one product; None where not needed."""
    x_NI, d_NO, low_NR, d_low_NR, weight_N = rows

    def gradient(left: Rows, right: Rows, *, index: int, scale: float = 1.0) -> torch.Tensor:
        want = wanted[index]
        assert want is not None
        grad = grouped_weight_grad(
            left, right, end_E, dtype=want.dtype, scale=scale, row_weight_N=weight_N, is_checked=False
        )
        # Autograd keeps a gradient whose memory order matches its parameter, and copies any other.
        return exchange_ends(grad, is_checked=False).permute(2, 1, 0) if want.is_expert_last else grad

    weight, bias, a, b = (None,) * _PER_LINEAR
    if needs[0]:
        is_transposed = wanted[0] is not None and wanted[0].is_transposed
        weight = gradient(d_NO, x_NI, index=0).transpose(1, 2) if is_transposed else gradient(x_NI, d_NO, index=0)
    if needs[1]:
        bias = gradient(rows_of(d_NO).new_ones(d_NO.shape[0], 1), d_NO, index=1)[:, 0]
    if needs[2]:
        assert d_low_NR is not None
        a = gradient(d_low_NR, x_NI, index=2, scale=linear.scale).transpose(1, 2)
    if needs[3]:
        assert low_NR is not None
        b = gradient(low_NR, d_NO, index=3, scale=linear.scale)
    return [weight, bias, a, b]


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
        score_TE = d_y_TD.to(d_weight_N.dtype) @ bias_ED.to(d_weight_N.dtype).T
        d_weight_TK = d_weight_TK + score_TE.gather(1, call.expert_TK.clamp(0, call.num_experts - 1).long())
    return torch.where(place_TK < end_E[-1], d_weight_TK, 0.0)


def _with_gate(columns_NP: torch.Tensor, *, has_gate: bool) -> torch.Tensor:
    """Return the columns of gate and up; without a gate the up half is 1."""
    return columns_NP if has_gate else torch.cat([columns_NP, torch.ones_like(columns_NP)], dim=1)
