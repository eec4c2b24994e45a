"""Tests of the Triton kernels, run in a process of their own: TRITON_INTERPRET must be set before Triton is first
imported.

``test_interpreted.py`` runs them in the interpreter, ``tests/gpu/test_kernels_gpu.py`` on the device.
"""

import itertools

import pytest
import torch

from lightning_fastft.kernels.attention import triton
from lightning_fastft.kernels.attention.tiled import tiled_attention
from tests.kernels.test_attention import SCALE, make_context, make_inputs, one_by_one
from tests.support.kernel_harness import DEVICE, NARROW, planted_faults
from tests.support.packs import relative_error

# Several documents in a tile, tiles inside one document, borders between tiles, and rows behind the pack.
PACKS = ((5,), (75,), (3,) * 9, (16, 32, 16), (20, 1, 7, 30, 17))
# Queries and keys of the forward and of both kernels of the backward: as many keys as queries, and fewer or more.
TILES = (((16, 16),) * 3, ((32, 16), (32, 16), (16, 32)))


# On a device the kernels choose their tiles, which are for 16-bit heads of real widths.
FORM = {"width": 16, "dtype": torch.float32} if DEVICE == "cpu" else {"width": 64, "dtype": NARROW}


def check(module, lengths, *, window=None, has_sink=False, tiles=0, heads=(4, 2), **form):
    """Output and gradients beside the definition in float64."""
    width, dtype = (FORM | form).values()
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(lengths)
    q, k, v, d_out = (
        torch.randn(num_tokens, num, width, generator=generator).to(dtype) for num in (*heads, heads[1], heads[0])
    )
    sink = torch.randn(heads[0], generator=generator) if has_sink else None
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    truth = one_by_one(*leaves, sink, lengths=lengths, window=window, softcap=None)
    truth.backward(d_out.double())
    # Rows of heads between others, as projections in one product leave them.
    parts = (*heads, heads[1], heads[0])
    wide = torch.full((num_tokens, sum(parts), width), float("nan"), dtype=dtype, device=DEVICE)
    q, k, v, d_out = (part.copy_(x) for part, x in zip(wide.split(parts, dim=1), (q, k, v, d_out)))
    start_S1 = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    document_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int().to(DEVICE)
    documents = module.Documents(start_S1, document_T)

    first, *others = [module.Tiles(*sizes, num_warps=4, num_stages=2) for sizes in TILES[tiles]]
    first, others = (first, tuple(others)) if DEVICE == "cpu" else (None, None)
    options = {"scale": SCALE, "window": window}
    sink_H = None if sink is None else sink.to(DEVICE)
    out, lse = module.attend(q, k, v, documents, **options, sink_H=sink_H, tiles=first)
    d_q, *shares, delta = module.attend_backward(
        q, k, v, documents, out_THW=out, lse_HT=lse, d_out_THW=d_out, **options, tiles=others
    )
    d_k, d_v = (x.float().unflatten(1, (heads[1], -1)).sum(dim=2) for x in shares)
    bound = 1e-5 if dtype is torch.float32 else 1e-2
    # With one visible key the true gradients of queries and keys are zero.
    for value, true in ((out, truth), (d_q, leaves[0].grad), (d_k, leaves[1].grad), (d_v, leaves[2].grad)):
        assert value.dtype is dtype or value.dtype is torch.float32
        error = (value.cpu().double() - true).norm() / max(true.norm(), truth.norm() * 0.1)
        assert error <= bound, error
    assert relative_error(delta.cpu(), (truth.detach() * d_out.cpu().double()).sum(dim=-1).T) <= bound * 10


@pytest.mark.parametrize("window", [None, 1, 12])
@pytest.mark.parametrize("lengths", PACKS)
def test_output_and_gradients_equal_the_definition(lengths, window):
    check(triton, lengths, window=window, has_sink=window == 12)


@pytest.mark.parametrize("heads", [(4, 1), (3, 3)])
def test_other_tiles_heads_and_dtypes(heads):
    check(triton, PACKS[-1], tiles=1, dtype=NARROW, heads=heads, width=32 if DEVICE == "cpu" else 128)


@pytest.mark.parametrize("num_groups", [2, 4])
@pytest.mark.parametrize("is_collected", [False, True])
def test_the_operation_gives_every_gradient(is_collected, num_groups):
    lengths, dtype, kept, shares = PACKS[-1], torch.float32 if DEVICE == "cpu" else NARROW, [], []
    context = make_context(lengths)
    inputs = make_inputs(context, num_groups=num_groups, width=64, dtype=dtype, has_sinks=True)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    truth = one_by_one(*doubles, lengths=lengths, window=12, softcap=None)
    truth.square().sum().backward()
    q, k, v, sink = (x.detach().to(DEVICE).requires_grad_() for x in inputs)

    def remember(compute):
        kept.append(compute())
        return kept[-1]

    collect = (lambda *found: shares.extend(found)) if is_collected else None
    options = {"scale": SCALE, "window": 12, "remember": remember, "collect": collect}
    out = tiled_attention(q, k, v, context=context.to(DEVICE), sink_H=sink, **options)
    assert out.data_ptr() == kept[0][0].data_ptr()
    out.float().square().sum().backward()
    if shares:
        assert k.grad is None
        k.grad, v.grad = (x.unflatten(1, (num_groups, -1)).sum(dim=2) for x in shares)
    assert bool(shares) == (is_collected and num_groups < 4)
    found = (out, q.grad, k.grad, v.grad, sink.grad)
    errors = [
        relative_error(x.detach().cpu(), y.detach())
        for x, y in zip(found, (truth, *(x.grad for x in doubles)), strict=True)
    ]
    assert max(errors) <= (1e-5 if dtype is torch.float32 else 2e-2), errors


def check_all(module):
    for lengths, window in itertools.product(PACKS[1:], (None, 12)):
        check(module, lengths, window=window, has_sink=True)
    check(module, PACKS[-1], tiles=1)


FAULTS = {
    "window of one key more": "rows - window {+ 1 => })",
    "start of the first document": "start_ptr + {document => 0 * document}).to(tl.int32)",
    "later keys seen": "(keys[None, :] >= start_M[:, None]) & (keys[None, :] <= {rows[:, None] => rows[:, None] + 1})\n        score",
    "other documents seen": "is_seen = {(keys[None, :] >= start_M[:, None]) & => }(keys[None, :] <= rows[:, None])\n        score",
    "whole tiles begin too early": "begin_unmasked = tl.minimum({tl.cdiv(tl.max(start_M), BLOCK_N) => tl.max(start_M) // BLOCK_N} * BLOCK_N, tile_start)\n    acc",
    "first tile lost": "for first_key in range({begin => begin + BLOCK_N}, begin_unmasked, BLOCK_N):\n        acc",
    "own tile lost": "tl.minimum(tile_start + {BLOCK_M => 0}, num_tokens), BLOCK_N):\n        acc",
    "old sum not scaled": "denominator = denominator {* rescale => }+ tl.sum(weight, axis=1)",
    "sink lost": "denominator = denominator * rescale {+ tl.exp2(sink - new_max) => }",
    "key head of another group": "k_ptr += head // {GROUP => 1} * k_stride_head\n    v_ptr += head // GROUP * v_stride_head\n    begin = tl.min(start_M) // BLOCK_N * BLOCK_N\n    # Whole",
    "row sums lost": "weight * (tl.dot(d_out, v.T) {- delta[:, None] => })",
    "scale of the queries' gradient": "(d_q {* scale => })",
    "scale of the keys' gradient": "(d_k {* scale => })",
    "end of the document": "end = tl.load(start_ptr + tl.load(document_ptr + last_key) {+ 1 => }).to(tl.int32)",
    "queries behind the window": "end = tl.minimum(end, last_key + {window => 1})",
    "whole tiles end too late": "end_unmasked = tl.maximum({end_unmasked => end} // BLOCK_M * BLOCK_M, tile_start + BLOCK_N)",
    "gradient rows taken for contiguous": "rows, num_tokens, {d_out_stride => NUM_HEADS * WIDTH}, WIDTH, False)",
    "gradient of another head": "d_out_ptr {+ head * d_out_stride_head => }, rows, num_tokens, d_out_stride",
    "values' gradient of one tile": "d_v = tl.dot(weight.to(d_out.dtype), d_out{, d_v => })",
}


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(triton, check_all, FAULTS)
