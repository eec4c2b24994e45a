"""The functions of fla-core that mixers call; on the meta device, functions that return tensors of the same shapes.

So a step of a hybrid model is metered without a GPU and without fla-core. Parameters have fla-core's names.

Axes: T tokens, H heads of values, K and V widths of keys and values, N chunks.
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

Tensors = tuple[torch.Tensor, ...]


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
def fla_kernel(read: Any, outs: Tensors) -> Tensors:
    """Return the results of a kernel of fla-core that reads these tensors; the meter knows it by this name."""
    return outs


def _sum_decays(g: torch.Tensor, **others: Any) -> torch.Tensor:
    return fla_kernel(g, (torch.empty_like(g, dtype=torch.float32),))[0]


def _rebuild_rows(*, k: torch.Tensor, v: torch.Tensor, **others: Any) -> Tensors:
    return fla_kernel((k, v, others), (k.new_empty(*v.shape[:3], k.shape[3]), torch.empty_like(v)))


def _solve_chunks(*, k: torch.Tensor, v: torch.Tensor, **others: Any) -> Tensors:
    rows = v.shape[:3]
    outs = k.new_empty(*rows, k.shape[3]), torch.empty_like(v), k.new_empty(*rows, CHUNK)
    return fla_kernel((k, v, others), outs)


def _run_states(
    *, k: torch.Tensor, u: torch.Tensor, chunk_indices: torch.Tensor, **others: Any
) -> tuple[torch.Tensor, torch.Tensor, None]:
    state, value = fla_kernel((k, u, others), (_states(k, u, chunk_indices), torch.empty_like(u)))
    return state, value, None


def _read_states(*, v: torch.Tensor, **others: Any) -> torch.Tensor:
    return fla_kernel((v, others), (torch.empty_like(v),))[0]


def _value_gradients(*, do: torch.Tensor, **others: Any) -> torch.Tensor:
    return fla_kernel((do, others), (torch.empty_like(do),))[0]


def _state_gradients(
    *, k: torch.Tensor, dv: torch.Tensor, chunk_indices: torch.Tensor, **others: Any
) -> tuple[torch.Tensor, None, torch.Tensor]:
    d_state, d_value = fla_kernel((k, dv, others), (_states(k, dv, chunk_indices), torch.empty_like(dv)))
    return d_state, None, d_value


def _row_gradients(*, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, g: torch.Tensor, **others: Any) -> Tensors:
    return fla_kernel((k, v, beta, g, others), tuple(map(torch.empty_like, (k, v, beta, g))))


def _states(k: torch.Tensor, value: torch.Tensor, chunk_indices: torch.Tensor) -> torch.Tensor:
    """Return memory for a state of each chunk, shape (1, N, H, K, V)."""
    return k.new_empty(1, len(chunk_indices), value.shape[2], k.shape[3], value.shape[3])


def _convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **others: Any
) -> tuple[torch.Tensor, None]:
    return _Rows.apply(x, weight, bias), None


def _norm(x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = _Rows.apply(x, None, None)
    return out


class _Rows(torch.autograd.Function):
    """A kernel of rows with a weight. Saves its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        return fla_kernel(x, (torch.empty_like(x),))[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        d_weights = (
            torch.empty_like(weight) if weight is not None and needs else None
            for weight, needs in zip(weights, ctx.needs_input_grad[1:])
        )
        return fla_kernel((x, d_out), (torch.empty_like(x),))[0], *d_weights


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
