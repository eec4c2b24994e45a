"""The functions of fla-core that mixers call; on the meta device, functions that return tensors of the same shapes.

With these a step of a hybrid model is metered without a GPU and without fla-core.

Axes: B = 1, T tokens, G heads of queries and keys, H heads of values, K and V their widths, N chunks, C channels.
"""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any

import torch

from lightning_fastft.core.once_differentiable import once_differentiable
from lightning_fastft.kernels.backends import one_kernel
from lightning_fastft.kernels.chunk_gradients.reference import CHUNK


def fla_functions(device: torch.device) -> SimpleNamespace:
    """Return the functions for tensors on this device, under their names in fla-core.

    Raises:
        ImportError: fla-core is not installed, and the device is not "meta".
    """
    return _SHAPES if device.type == "meta" else _load_fla()


@functools.cache
def _load_fla() -> SimpleNamespace:
    # Imported on first use: the package is optional and loads Triton.
    from fla.modules import causal_conv1d
    from fla.modules.norm import l2norm
    from fla.ops.common import chunk_delta_h, chunk_o
    from fla.ops.gated_delta_rule import chunk_fwd, wy_fast
    from fla.ops.utils import chunk_local_cumsum, constant

    return SimpleNamespace(
        RCP_LN2=constant.RCP_LN2,
        causal_conv1d=causal_conv1d.causal_conv1d,
        chunk_bwd_dv_local=chunk_o.chunk_bwd_dv_local,
        chunk_fwd_o=chunk_o.chunk_fwd_o,
        chunk_gated_delta_rule_bwd_dhu=chunk_delta_h.chunk_gated_delta_rule_bwd_dhu,
        chunk_gated_delta_rule_fwd_h=chunk_delta_h.chunk_gated_delta_rule_fwd_h,
        chunk_gated_delta_rule_fwd_intra=chunk_fwd.chunk_gated_delta_rule_fwd_intra,
        chunk_local_cumsum=chunk_local_cumsum,
        l2norm=l2norm.l2norm,
        prepare_wy_repr_bwd=wy_fast.prepare_wy_repr_bwd,
        recompute_w_u_fwd=wy_fast.recompute_w_u_fwd,
    )


@one_kernel
def _sum_decays(g_1TH: torch.Tensor, **options: Any) -> torch.Tensor:
    return torch.empty_like(g_1TH, dtype=torch.float32)


@one_kernel
def _solve_chunks(
    *, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return k.new_empty(*v.shape[:3], k.shape[3]), torch.empty_like(v), k.new_empty(*v.shape[:3], CHUNK)


@one_kernel
def _rebuild_rows(
    *, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, A: torch.Tensor, g: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return k.new_empty(*v.shape[:3], k.shape[3]), torch.empty_like(v)


@one_kernel
def _run_states(
    *,
    k: torch.Tensor,
    w: torch.Tensor,
    u: torch.Tensor,
    g: torch.Tensor,
    chunk_indices: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, None]:
    num_heads, width = u.shape[2:]
    return k.new_empty(1, len(chunk_indices), num_heads, k.shape[3], width), torch.empty_like(u), None


@one_kernel
def _read_states(
    *, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, h: torch.Tensor, g: torch.Tensor, **options: Any
) -> torch.Tensor:
    return torch.empty_like(v)


@one_kernel
def _value_gradients(
    *, q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, do: torch.Tensor, **options: Any
) -> torch.Tensor:
    return torch.empty_like(do)


@one_kernel
def _state_gradients(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    g: torch.Tensor,
    do: torch.Tensor,
    dv: torch.Tensor,
    chunk_indices: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    num_heads, width = do.shape[2:]
    return q.new_empty(1, len(chunk_indices), num_heads, k.shape[3], width), None, torch.empty_like(dv)


@one_kernel
def _row_gradients(
    *,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    g: torch.Tensor,
    A: torch.Tensor,
    dw: torch.Tensor,
    du: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(k), torch.empty_like(v), torch.empty_like(beta), torch.empty_like(g)


def _convolve(
    x_1TC: torch.Tensor, weight_CK: torch.Tensor, bias_C: torch.Tensor | None = None, **options: Any
) -> tuple[torch.Tensor, None]:
    return _Rows.apply(x_1TC, weight_CK, bias_C), None


def _norm(x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = _Rows.apply(x, None, None)
    return found


class _Rows(torch.autograd.Function):
    """A kernel of rows with a weight: reads its input in the forward, and in the backward once more."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        return _run_rows(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        found = (
            torch.empty_like(weight) if weight is not None and needs else None
            for weight, needs in zip(weights, ctx.needs_input_grad[1:])
        )
        return _run_row_gradients(x, d_out), *found


@one_kernel
def _run_rows(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@one_kernel
def _run_row_gradients(x: torch.Tensor, d_out: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


_SHAPES = SimpleNamespace(
    RCP_LN2=1 / math.log(2),
    causal_conv1d=_convolve,
    chunk_bwd_dv_local=_value_gradients,
    chunk_fwd_o=_read_states,
    chunk_gated_delta_rule_bwd_dhu=_state_gradients,
    chunk_gated_delta_rule_fwd_h=_run_states,
    chunk_gated_delta_rule_fwd_intra=_solve_chunks,
    chunk_local_cumsum=_sum_decays,
    l2norm=_norm,
    prepare_wy_repr_bwd=_row_gradients,
    recompute_w_u_fwd=_rebuild_rows,
)
# Names of the functions that compute what one kernel of fla-core does.
SHAPE_FUNCTIONS = tuple(
    function.__name__
    for function in (
        _read_states,
        _rebuild_rows,
        _row_gradients,
        _run_row_gradients,
        _run_rows,
        _run_states,
        _solve_chunks,
        _state_gradients,
        _sum_decays,
        _value_gradients,
    )
)
