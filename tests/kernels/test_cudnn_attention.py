"""The backend "cudnn" around functions that stand in for cuDNN's, and compute by the definition, on a CPU."""

import sys

import pytest
import torch

from lightning_fastft.core.errors import MissingDependencyError
from lightning_fastft.kernels.attention import cudnn_backend
from lightning_fastft.kernels.attention.cudnn_backend import cudnn_attention
from lightning_fastft.kernels.attention.op import packed_attention
from lightning_fastft.packing.context import BatchContext

SCALE = 0.3
LENGTHS = [9, 1, 6, 2, 5]


def make_context(lengths):
    return BatchContext(lengths=lengths, label_T=torch.full((sum(lengths),), -100), num_items=1)


def make_inputs(num_tokens, *, num_heads=8, num_kv_heads=4, width=16):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(num_tokens, count, width, generator=generator, requires_grad=True)
        for count in (num_heads, num_kv_heads, num_kv_heads)
    ]


def hidden_keys(start, *, window):
    """True where a query does not see a key, shape (T, T)."""
    place = torch.arange(int(start[-1]))
    document = torch.searchsorted(start[1:].long(), place, right=True)
    seen = (document[:, None] == document) & (place <= place[:, None])
    return ~(seen & (place > place[:, None] - window) if window >= 0 else seen)


class Cudnn:
    """The two functions, which record their arguments."""

    def __init__(self):
        self.forwards, self.backwards = [], []

    def forward(self, q, k, v, **options):
        self.forwards.append(((q, k, v), options))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        score = torch.einsum("qhw,khw->hqk", q, k) * options["scale"]
        score = score.masked_fill(hidden_keys(options["cu_seqlens_q"], window=options["window_left"]), -torch.inf)
        return torch.einsum("hqk,khw->qhw", score.softmax(-1), v), score.logsumexp(-1).T[..., None]

    def backward(self, d_out, q, k, v, out, lse, attn_scale, **options):
        self.backwards.append(((d_out, q, k, v, out, lse), options))
        start, num_kv = options["cu_seqlens_q"], k.shape[1]
        assert lse.shape == (start.numel() - 1, q.shape[1], options["max_seqlen_q"])
        lengths = start.diff().tolist()
        lse = torch.cat([lse[number, :, :length] for number, length in enumerate(lengths)], dim=1)
        k, v = (x.repeat_interleave(q.shape[1] // num_kv, dim=1) for x in (k, v))
        score = torch.einsum("qhw,khw->hqk", q, k) * attn_scale
        share = (score - lse[..., None]).exp().masked_fill(hidden_keys(start, window=options["window_left"]), 0)
        d_share = torch.einsum("qhw,khw->hqk", d_out, v)
        d_score = share * (d_share - (d_out * out).sum(-1).T[..., None]) * attn_scale
        d_q = torch.einsum("hqk,khw->qhw", d_score, k)
        by_head = torch.einsum("hqk,qhw->khw", d_score, q), torch.einsum("hqk,qhw->khw", share, d_out)
        return d_q, *(x.unflatten(1, (num_kv, -1)).sum(2) for x in by_head)


@pytest.fixture
def cudnn(monkeypatch):
    found = Cudnn()
    monkeypatch.setattr(cudnn_backend, "_load_cudnn", lambda: found)
    return found


def gradients(inputs, *, weight, context, window=None, backend="reference", remember=None):
    if backend == "reference":
        options = {"softcap": None, "sink_H": None, "backend": backend}
        out = packed_attention(*inputs, context=context, scale=SCALE, window=window, **options)
    else:
        out = cudnn_attention(*inputs, context=context, scale=SCALE, window=window, remember=remember)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_output_and_gradients_in_groups_of_heads(cudnn, monkeypatch, num_groups, window):
    context, inputs = make_context(LENGTHS), make_inputs(sum(LENGTHS))
    weight = torch.randn(sum(LENGTHS), 8, 16)
    workspace_bytes = cudnn_backend._WORKSPACE_PER_VALUE * inputs[0].numel()
    monkeypatch.setattr(cudnn_backend, "_GROUP_WORKSPACE_BYTES", workspace_bytes / num_groups)
    found = gradients(inputs, weight=weight, context=context, window=window, backend="cudnn")
    assert [arguments[2].shape[1] for arguments, _ in cudnn.backwards] == [4 // num_groups] * num_groups
    assert all(each.is_contiguous() for arguments, _ in cudnn.backwards for each in arguments)
    for ours, true in zip(found, gradients(inputs, weight=weight, context=context, window=window), strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-4, atol=1e-5)


def test_the_workspace_of_a_group_stays_in_its_bound():
    for num_tokens in (8192, 32_768, 131_072, 262_144):
        for num_heads, num_kv_heads in ((32, 8), (40, 8), (64, 8), (28, 4)):
            num_values = num_tokens * num_heads * 128
            num_groups = cudnn_backend.count_head_groups(num_values, num_kv_heads=num_kv_heads)
            assert num_kv_heads % num_groups == 0
            workspace_bytes = 12 * num_values / num_groups
            assert workspace_bytes <= 2 * 2**30 or num_groups == num_kv_heads
            assert num_groups == 1 or 12 * num_values > 2 * 2**30


def test_a_remembered_output_is_not_computed_again(cudnn):
    context, inputs = make_context(LENGTHS), make_inputs(sum(LENGTHS))
    weight, kept = torch.randn(sum(LENGTHS), 8, 16), []

    def remember(compute):
        if not kept:
            kept.append(compute())
        return kept[0]

    runs = [gradients(inputs, weight=weight, context=context, backend="cudnn", remember=remember) for _ in range(2)]
    assert len(cudnn.forwards) == 1
    assert all(map(torch.equal, *runs))
    assert [tuple(each.shape) for each in kept[0]] == [(23, 8, 16), (23, 8)]


@pytest.mark.parametrize("window", [None, 4])
def test_cudnn_gets_bucketed_shapes_and_the_window(cudnn, window):
    context, inputs = make_context(LENGTHS), make_inputs(sum(LENGTHS))
    for _ in range(2):
        gradients(inputs, weight=torch.ones(23, 8, 16), context=context, window=window, backend="cudnn")
    (_, first), (_, second) = cudnn.forwards
    assert first["cu_seqlens_q"].tolist() == [0, 9, 10, 16, 18, 23, 23, 23, 23]
    assert first["cu_seqlens_q"].dtype == torch.int32
    assert first["cu_seqlens_kv"] is second["cu_seqlens_q"]
    assert (first["max_seqlen_q"], first["window_left"]) == (16, -1 if window is None else window)
    assert first["is_causal"]
    assert first["return_lse"]
    same = ("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv", "window_left", "is_causal")
    for _, options in cudnn.backwards:
        assert all(options[name] is first[name] or options[name] == first[name] for name in same)
    assert context.num_builds == {"cudnn_varlen": 1}


def test_cudnn_gets_contiguous_tensors_as_they_are_and_copies_of_others(cudnn):
    context = make_context([9, 1])
    heads = [torch.randn(10, count, 16) for count in (4, 2, 2)]
    cudnn_attention(*heads, context=context, scale=SCALE, window=None)
    assert [each.data_ptr() for each in cudnn.forwards[0][0]] == [each.data_ptr() for each in heads]
    outermost = [torch.randn(count, 10, 16).transpose(0, 1) for count in (4, 2, 2)]
    between = torch.randn(10, 8, 16).split((4, 2, 2), dim=1)
    for others in (outermost, between):
        cudnn_attention(*others, context=context, scale=SCALE, window=None)
        assert all(each.is_contiguous() for each in cudnn.forwards[-1][0])


def test_cudnn_missing_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", None)
    context = make_context([4])
    with pytest.raises(MissingDependencyError, match=r"lightning-fastft\[hopper\]"):
        cudnn_attention(*make_inputs(4), context=context, scale=SCALE, window=None)
