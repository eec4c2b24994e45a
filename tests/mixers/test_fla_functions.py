"""The functions of fla-core on the meta device: shapes, dtypes, and what they save for the backward."""

import torch

from lightning_fastft.mixers.fla_functions import fla_functions

LENGTHS = (3, 64, 63)
T, H, W = sum(LENGTHS), 2, 32


def test_kimi_delta_attention_saves_what_fla_core_saves_and_returns_every_gradient():
    start_S1 = torch.empty(len(LENGTHS) + 1, dtype=torch.int32, device="meta")
    q, k, v = (torch.empty(1, T, H, W, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(3))
    g = torch.empty(1, T, H, W, device="meta", requires_grad=True)
    beta = torch.empty(1, T, H, dtype=torch.bfloat16, device="meta", requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        out, state = fla_functions(q.device).chunk_kda(
            q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, cu_seqlens=start_S1, use_graph=True
        )
    assert state is None
    assert (out.shape, out.dtype) == (v.shape, v.dtype)
    # Of each head: queries and keys after their norm, values; decays and their sums in fp32; strength; two products.
    per_head = 3 * W * 2 + 2 * W * 4 + 2 + 2 * 64 * 2
    assert sum(tensor.nbytes for tensor in saved) == T * H * per_head
    assert not any(tensor is x for tensor in saved for x in (q, k))
    out.sum().backward()
    assert all((x.grad.shape, x.grad.dtype) == (x.shape, x.dtype) for x in (q, k, v, g, beta))
