"""The functions of fla-core that mixers call, and stand-ins for the meta device.

A stand-in returns empty tensors with the shapes, and saves the same tensors for the backward. It lets the meter run a
step of a hybrid model without a GPU and without fla-core. Parameters have fla-core's names.

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
from lightning_fastft.kernels.sizes import ceil_div

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
    from fla.ops.kda import chunk_kda
    from fla.ops.utils import chunk_local_cumsum, constant

    return SimpleNamespace(
        RCP_LN2=constant.RCP_LN2,
        causal_conv1d=causal_conv1d.causal_conv1d,
        chunk_bwd_dv_local=chunk_o.chunk_bwd_dv_local,
        chunk_fwd_o=chunk_o.chunk_fwd_o,
        chunk_gated_delta_rule_bwd_dhu=chunk_delta_h.chunk_gated_delta_rule_bwd_dhu,
        chunk_gated_delta_rule_fwd_h=chunk_delta_h.chunk_gated_delta_rule_fwd_h,
        chunk_gated_delta_rule_fwd_intra=chunk_fwd.chunk_gated_delta_rule_fwd_intra,
        chunk_kda=chunk_kda,
        chunk_local_cumsum=chunk_local_cumsum,
        l2norm=l2norm.l2norm,
        prepare_wy_repr_bwd=wy_fast.prepare_wy_repr_bwd,
        recompute_w_u_fwd=wy_fast.recompute_w_u_fwd,
    )


@one_kernel
def fla_kernel(read: Any, outs: Tensors) -> Tensors:
    """Return the results of a kernel of fla-core that reads these tensors; the meter knows it by this name."""
    return outs


# Stand-ins for single kernels; the table at the end of the file has the function of fla-core for each.


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
    state, value = fla_kernel((k, u, others), (_empty_states(k, u, chunk_indices), torch.empty_like(u)))
    return state, value, None


def _read_states(*, v: torch.Tensor, **others: Any) -> torch.Tensor:
    return fla_kernel((v, others), (torch.empty_like(v),))[0]


def _value_gradients(*, do: torch.Tensor, **others: Any) -> torch.Tensor:
    return fla_kernel((do, others), (torch.empty_like(do),))[0]


def _state_gradients(
    *, k: torch.Tensor, dv: torch.Tensor, chunk_indices: torch.Tensor, **others: Any
) -> tuple[torch.Tensor, None, torch.Tensor]:
    d_state, d_value = fla_kernel((k, dv, others), (_empty_states(k, dv, chunk_indices), torch.empty_like(dv)))
    return d_state, None, d_value


def _row_gradients(*, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, g: torch.Tensor, **others: Any) -> Tensors:
    return fla_kernel((k, v, beta, g, others), tuple(map(torch.empty_like, (k, v, beta, g))))


def _empty_states(k: torch.Tensor, value: torch.Tensor, chunk_indices: torch.Tensor) -> torch.Tensor:
    """Return an empty state for each chunk, shape (1, N, H, K, V)."""
    return k.new_empty(1, len(chunk_indices), value.shape[2], k.shape[3], value.shape[3])


def _convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **others: Any
) -> tuple[torch.Tensor, None]:
    return _Rows.apply(x, weight, bias), None


def _norm(x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = _Rows.apply(x, None, None)
    return out


class _Rows(torch.autograd.Function):
    """The causal convolution and the norm: one kernel forward and one backward. Saves the input and the weights."""

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


def _kimi_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    use_graph: bool,
) -> tuple[torch.Tensor, None]:
    # In graph mode there is memory for the most chunks possible: each document after the first adds at most one.
    num_chunks = ceil_div(q.shape[1], CHUNK) + len(cu_seqlens) - 2
    return _KimiRule.apply(q, k, v, g, beta, num_chunks, use_qk_l2norm_in_kernel), None


class _KimiRule(torch.autograd.Function):
    """Kimi delta attention, kernel by kernel as in fla-core's ``chunk_kda``.

    Saves normed queries and keys, the other inputs, summed decays, and per chunk the scores and the inverse of the
    triangular system of the keys.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        num_chunks: int,
        has_norms: bool,
    ) -> torch.Tensor:
        ctx.num_chunks, ctx.has_norms = num_chunks, has_norms
        if has_norms:
            q, k = (fla_kernel(x, (torch.empty_like(x),))[0] for x in (q, k))
        decay = _sum_decays(g)
        squares = (k.new_empty(*k.shape[:3], CHUNK) for _ in range(2))
        w, u, scaled_k, score, inverse = fla_kernel(
            (q, k, v, decay, beta), (*map(torch.empty_like, (k, v, k)), *squares)
        )
        state, value = _kimi_states(scaled_k, w, u, decay, num_chunks=num_chunks)
        ctx.save_for_backward(q, k, v, g, decay, beta, score, inverse)
        out: torch.Tensor = fla_kernel((q, value, decay, score, state), (torch.empty_like(v),))[0]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, g, decay, beta, score, inverse = ctx.saved_tensors
        rebuilt = fla_kernel((q, k, v, beta, inverse, decay), tuple(map(torch.empty_like, (k, v, q, k))))
        w, u, scaled_q, scaled_k = rebuilt
        state, value = _kimi_states(scaled_k, w, u, decay, num_chunks=ctx.num_chunks)
        d_score, d_value = fla_kernel((q, value, d_out, score), (_empty_fp32(score), torch.empty_like(d_out)))
        d_state, d_value = fla_kernel(
            (scaled_q, scaled_k, w, decay, d_out, d_value), (torch.empty_like(state), torch.empty_like(d_value))
        )
        *grads, d_inverse, d_v = fla_kernel(
            (q, k, v, value, decay, beta, inverse, state, d_out, d_state, d_value),
            (*map(_empty_fp32, (q, k, decay, beta, inverse)), torch.empty_like(v)),
        )
        del rebuilt, w, u, scaled_q, scaled_k, state, value, d_state, d_value
        d_q, d_k, d_decay, d_beta = fla_kernel(
            (q, k, decay, beta, d_score, d_inverse, *grads), tuple(map(_empty_fp32, (q, k, decay, beta)))
        )
        del grads
        d_g = _sum_decays(d_decay)
        if ctx.has_norms:
            d_q, d_k = (fla_kernel((x, d_x), (torch.empty_like(d_x),))[0] for x, d_x in ((q, d_q), (k, d_k)))
        return d_q.to(q.dtype), d_k.to(k.dtype), d_v, d_g.to(g.dtype), d_beta.to(beta.dtype), None, None


def _kimi_states(k: torch.Tensor, w: torch.Tensor, u: torch.Tensor, decay: torch.Tensor, *, num_chunks: int) -> Tensors:
    """Return the state at the start of each chunk, and the values that the chunks add to it."""
    state = k.new_empty(1, num_chunks, *k.shape[2:], u.shape[3])
    return fla_kernel((k, w, u, decay), (state, torch.empty_like(u)))


def _empty_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, dtype=torch.float32)


_SHAPES = SimpleNamespace(
    RCP_LN2=1 / math.log(2),
    causal_conv1d=_convolve,
    chunk_bwd_dv_local=_value_gradients,
    chunk_fwd_o=_read_states,
    chunk_gated_delta_rule_bwd_dhu=_state_gradients,
    chunk_gated_delta_rule_fwd_h=_run_states,
    chunk_gated_delta_rule_fwd_intra=_solve_chunks,
    chunk_kda=_kimi_rule,
    chunk_local_cumsum=_sum_decays,
    l2norm=_norm,
    prepare_wy_repr_bwd=_row_gradients,
    recompute_w_u_fwd=_rebuild_rows,
)
