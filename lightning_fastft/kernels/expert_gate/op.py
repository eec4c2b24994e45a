"""The gate of an expert: the activation between its two products and its gradient, each in one pass over memory.

Axes: N routed slots, sorted by expert; F expert width; P = 2 F columns that hold gate and up; R ranks of a low-rank
    product.
Neither function is differentiable; the autograd Functions of layers call them.
"""

from __future__ import annotations

import torch

from lightning_fastft.core.checks import check_bool, check_choice, check_float, check_layout
from lightning_fastft.core.errors import OptionError, ShapeError
from lightning_fastft.kernels.backends import FLOATING, TRITON_DTYPES, choose_module, must_check, no_graph
from lightning_fastft.kernels.expert_gate import reference
from lightning_fastft.kernels.expert_gate.reference import (
    ACTIVATIONS,
    GateForm,
    LowRankRows,
)
from lightning_fastft.kernels.fp8_linear.reference import Fp8Rows


def gate_forward(
    gate_up_NP: torch.Tensor,
    *,
    form: GateForm,
    end_E: torch.Tensor | None = None,
    is_checked: bool = True,
) -> torch.Tensor:
    """Return the activation of each row, ``a(gate) * up`` in the given form.

    The arithmetic is fp32 (float64 for float64) and the result is rounded once. Rows are independent, so NaN stays in
    its row.

    Args:
        gate_up_NP: Output of the first product. Shape (N, 2 F); bf16, fp16, fp32 or float64; last axis contiguous, any
            row stride.
        form: Positions of gate and up, and the activation.
        end_E: One past the last row of each expert, int32 or int64, its last entry at most N. Later rows hold arbitrary
            values. None for all rows.
        is_checked: As in ``must_check``.

    Returns:
        act_NF: Shape (N, F), contiguous, dtype and device of gate_up_NP, no graph.

    Cost:
        Reads gate_up_NP and writes act_NF once, the rows before ``end_E[-1]`` if given; no host sync. The reference
        makes fp32 copies and takes all rows.

    Source:
        GLU variants, arXiv 2002.05202; clamped form: gpt-oss as in transformers.

    Example:
        >>> gate_forward(torch.tensor([[0.0, 100.0, 5.0, 2.0]]), form=GateForm())
        tensor([[  0., 200.]])
    """
    if must_check(is_checked):
        _check_gate_up(gate_up_NP)
        _check_form(form)
        _check_end(end_E, gate_up_NP)
    with no_graph():
        return choose_module(reference, gate_up_NP).gate_forward(gate_up_NP, form=form, end_E=end_E)


def gate_backward(
    d_act_NF: torch.Tensor,
    gate_up_NP: torch.Tensor,
    *,
    form: GateForm,
    weight_N: torch.Tensor | None = None,
    addend: LowRankRows | None = None,
    need_act: bool = False,
    end_E: torch.Tensor | None = None,
    is_checked: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of ``weight[n] * (activation[n] @ W)``, and the recomputed activation.

    The routing weight is applied here: d_act_NF is the gradient of the product without its weight, times W^T. A value
    on the bound of a clamp has the gradient that the installed torch gives it. The low-rank part of d_act_NF is
    computed and added in fp32 (float64 for float64), tile by tile, and never stored. Sums have a fixed order, so two
    calls are bit-equal.

    Args:
        d_act_NF: Gradient of the activation, not yet multiplied by weight_N. Shape (N, F); dtype and device of
            gate_up_NP; last axis contiguous.
        gate_up_NP: As given to ``gate_forward``.
        form: As given to ``gate_forward``.
        weight_N: Routing weight of each row. Shape (N,); bf16, fp16, fp32 or float64; any stride. None for 1.
        addend: Low-rank product that is added to d_act_NF first; dtype and device of d_act_NF, any R. None for none.
        need_act: Return the activation, as in ``gate_forward``, for the gradient of the second product's weight.
        end_E: As in ``gate_forward``, for all results.
        is_checked: As in ``must_check``.

    Returns:
        d_gate_up_NP: Gradient of gate_up_NP, in its dtype and order of columns; contiguous.
        act_NF: Shape (N, F), the activation without the weight; None unless need_act.
        d_weight_N: Shape (N,), sum over F of d_act_NF times the activation, fp32 (float64 for float64); None without
            weight_N.

    Cost:
        Reads d_act_NF and gate_up_NP once, writes d_gate_up_NP (and act_NF) once; no host sync. An addend costs 2 N R F
        FLOP more, and its factor is read once per 16 rows, from the cache if it fits. The reference makes fp32 copies.

    Source:
        The chain rule; on the bounds of a clamp torch.clamp of the installed version (``CLAMP_PASSES_BOUND``).

    Example:
        >>> gate_up, d_act, weight = torch.tensor([[0.0, 3.0]]), torch.tensor([[4.0]]), torch.tensor([0.5])
        >>> gate_backward(d_act, gate_up, form=GateForm(), weight_N=weight)[0]
        tensor([[3., 0.]])
    """
    if must_check(is_checked):
        _check_gate_up(gate_up_NP)
        _check_form(form)
        _check_end(end_E, gate_up_NP)
        num_rows, num_columns = gate_up_NP.shape
        check_layout("d_act_NF", d_act_NF, (num_rows, num_columns // 2), like=gate_up_NP, num_strided=1)
        if weight_N is not None:
            check_layout("weight_N", weight_N, (num_rows,), dtypes=FLOATING, like=gate_up_NP, num_strided=1)
        if addend is not None:
            _check_addend(addend, d_act_NF)
    module = choose_module(reference, gate_up_NP)
    with no_graph():
        return module.gate_backward(
            d_act_NF,
            gate_up_NP,
            form=form,
            weight_N=weight_N,
            addend=addend,
            need_act=need_act,
            end_E=end_E,
        )


def gate_forward_quantised(
    gate_up_NP: torch.Tensor,
    *,
    form: GateForm,
    round_scales_to_power_of_2: bool = False,
    is_checked: bool = True,
) -> Fp8Rows:
    """Return ``quantise_rows(gate_forward(gate_up))`` bit for bit, in one kernel.

    Args:
        gate_up_NP: As in ``gate_forward``, F > 0; bf16, fp16 or fp32.
        form: As in ``gate_forward``.
        round_scales_to_power_of_2: As in ``quantise_rows``.
        is_checked: As in ``must_check``.

    Returns:
        The activation in e4m3 and the scales of its rows, in new memory.

    Raises:
        ShapeError: As in ``gate_forward``.
        OptionError: As in ``gate_forward``.

    Cost:
        Reads gate_up_NP once and writes one byte per number of the activation; no host sync. The reference makes fp32
        copies.

    Source:
        own.

    Example:
        >>> rows = gate_forward_quantised(torch.tensor([[0.0, 100.0, 5.0, 2.0]]), form=GateForm())
        >>> rows.values_TI.float() * rows.scale_T[:, None]
        tensor([[  0., 200.]])
    """
    if must_check(is_checked):
        _check_quantised(gate_up_NP, form, round_scales_to_power_of_2)
    with no_graph():
        return choose_module(reference, gate_up_NP).gate_forward_quantised(
            gate_up_NP, form=form, round_scales_to_power_of_2=round_scales_to_power_of_2
        )


def gate_backward_quantised(
    d_act_NF: torch.Tensor,
    gate_up_NP: torch.Tensor,
    *,
    form: GateForm,
    factor_P: torch.Tensor,
    round_scales_to_power_of_2: bool = False,
    need_act: bool = False,
    is_checked: bool = True,
) -> tuple[Fp8Rows, Fp8Rows | None]:
    """Return both results of ``gate_backward`` as ``quantise_rows`` returns them, bit for bit, in one kernel.

    Args:
        d_act_NF: As in ``gate_backward``, without weights of rows.
        gate_up_NP: As in ``gate_forward_quantised``.
        form: As in ``gate_forward``.
        factor_P: Factor on each column of the gradient before it is quantised. Shape (2 F,), fp32 or bf16, contiguous.
        round_scales_to_power_of_2: As in ``quantise_rows``, for both results.
        need_act: Return the activation too.
        is_checked: As in ``must_check``.

    Returns:
        Gradient of gate_up_NP times the factor, and the activation, None unless need_act; in e4m3 with the scales of
        their rows, in new memory.

    Raises:
        ShapeError: As in ``gate_backward``.
        OptionError: As in ``gate_backward``.

    Cost:
        Reads d_act_NF and gate_up_NP once and writes one byte per number of the results; no host sync. The reference
        makes fp32 copies.

    Source:
        own.

    Example:
        >>> gate_up, d_act = torch.tensor([[0.0, 3.0]]), torch.tensor([[4.0]])
        >>> rows = gate_backward_quantised(d_act, gate_up, form=GateForm(), factor_P=torch.ones(2))[0]
        >>> rows.values_TI.float() * rows.scale_T[:, None]
        tensor([[6., 0.]])
    """
    if must_check(is_checked):
        _check_quantised(gate_up_NP, form, round_scales_to_power_of_2)
        num_rows, num_columns = gate_up_NP.shape
        check_layout("d_act_NF", d_act_NF, (num_rows, num_columns // 2), like=gate_up_NP, num_strided=1)
        check_layout("factor_P", factor_P, (num_columns,), dtypes=(torch.float32, torch.bfloat16), like=gate_up_NP)
    with no_graph():
        return choose_module(reference, gate_up_NP).gate_backward_quantised(
            d_act_NF,
            gate_up_NP,
            form=form,
            factor_P=factor_P,
            round_scales_to_power_of_2=round_scales_to_power_of_2,
            need_act=need_act,
        )


def _check_quantised(gate_up_NP: torch.Tensor, form: GateForm, round_scales_to_power_of_2: bool) -> None:
    """Raise on rows and options that are not quantised."""
    check_layout("gate_up_NP", gate_up_NP, (None, None), dtypes=TRITON_DTYPES, num_strided=1)
    _check_gate_up(gate_up_NP)
    if gate_up_NP.shape[1] == 0:
        raise ShapeError("gate_up_NP has no columns; the scale of a row needs at least one.")
    _check_form(form)
    check_bool("round_scales_to_power_of_2", round_scales_to_power_of_2)


def _check_form(form: GateForm) -> None:
    """Raise on an unknown form."""
    if not isinstance(form, GateForm):
        raise OptionError(f"form must be a GateForm, got {type(form).__name__}.")
    check_choice("form.is_interleaved", form.is_interleaved, (False, True))
    check_choice("form.activation", form.activation, ACTIVATIONS)
    if form.activation == "clamped":
        check_float("form.limit", form.limit, low=0.0)
        check_float("form.alpha", form.alpha, low=0.0)


def _check_gate_up(gate_up_NP: torch.Tensor) -> None:
    """Raise on shapes, dtypes, devices and layouts that the kernels cannot read."""
    if check_layout("gate_up_NP", gate_up_NP, (None, None), dtypes=FLOATING, num_strided=1).shape[1] % 2:
        raise ShapeError(
            f"gate_up_NP has {gate_up_NP.shape[1]} columns; gate and up have the same width, so their number must be "
            "even."
        )


def _check_end(end_E: torch.Tensor | None, gate_up_NP: torch.Tensor) -> None:
    """Raise on invalid ends, or ends on another device than the rows."""
    if end_E is None:
        return
    check_layout("end_E", end_E, (None,), dtypes=(torch.int32, torch.int64), like=gate_up_NP)
    if not end_E.shape[0]:
        raise ShapeError("end_E is empty; it needs one entry per expert, at least one.")


def _check_addend(addend: LowRankRows, d_act_NF: torch.Tensor) -> None:
    """Raise if the product of the factors does not have the shape of the gradient."""
    if not isinstance(addend, LowRankRows):
        raise OptionError(f"addend must be LowRankRows or None, got {type(addend).__name__}.")
    low_NR, factor_RF = addend
    num_rows, num_columns = d_act_NF.shape
    check_layout("addend.low_NR", low_NR, (num_rows, None), like=d_act_NF, num_strided=1)
    check_layout("addend.factor_RF", factor_RF, (low_NR.shape[1], num_columns), like=d_act_NF, num_strided=1)
