import itertools
import math

import pytest
import torch

from lightning_fastft.core.errors import BackendError, MissingDependencyError, OptionError, ShapeError
from lightning_fastft.kernels.attention import flash, sdpa
from lightning_fastft.kernels.attention.op import (
    BACKENDS,
    AttentionNeed,
    _check_forced,
    choose_backend,
    find_obstacle,
    gather_keys,
    packed_attention,
)
from lightning_fastft.kernels.attention.reference import masked_attention
from lightning_fastft.packing.context import BatchContext
from lightning_fastft.packing.spans import BidirectionalSpans

pytestmark = pytest.mark.covering

FLEX_WARNING = "ignore:flex_attention called without torch.compile"
SCALE = 0.3


def make_context(lengths):
    return BatchContext(lengths=lengths, label_T=torch.full((sum(lengths),), -100), num_items=1)


def make_inputs(
    context, *, num_heads=4, num_groups=2, width=16, value_width=None, dtype=torch.float32, has_sinks=False, seed=0
):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_heads, width), (num_groups, width), (num_groups, value_width or width)]
    q, k, v = (
        torch.randn(context.num_tokens, *shape, generator=generator).to(dtype).requires_grad_() for shape in shapes
    )
    sink = torch.randn(num_heads, generator=generator).to(dtype).requires_grad_() if has_sinks else None
    return q, k, v, sink


def one_by_one(q, k, v, sink, *, lengths, window, softcap):
    """The definition with a loop over documents, heads and queries, in float64: shares no code with the package."""
    q, k, v = q.double(), k.double(), v.double()
    out, start = [], 0
    repeats = q.shape[1] // k.shape[1]
    for length in lengths:
        for query in range(start, start + length):
            first = start if window is None else max(start, query - window + 1)
            heads = []
            for head in range(q.shape[1]):
                score = k[first : query + 1, head // repeats] @ q[query, head] * SCALE
                if softcap is not None:
                    score = softcap * torch.tanh(score / softcap)
                if sink is not None:
                    score = torch.cat([score, sink[head : head + 1].double()])
                share = score.softmax(0)[: query + 1 - first]
                heads.append(share @ v[first : query + 1, head // repeats])
            out.append(torch.stack(heads))
        start += length
    return torch.stack(out)


def run(backend, inputs, context, *, window=None, softcap=None, weight=None):
    """Output and gradients of one backend."""
    q, k, v, sink = inputs
    out = packed_attention(
        q, k, v, context=context, scale=SCALE, window=window, softcap=softcap, sink_H=sink, backend=backend
    )
    if weight is None:
        return [out.detach()]
    leaves = [x for x in inputs if x is not None]
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


def distance(value, truth):
    return float((value.detach().double() - truth.detach().double()).norm())


def error(value, truth):
    return distance(value, truth) / float(truth.detach().double().norm())


def largest_value(true, truths):
    """Where a query sees one key, its true gradient is 0, the difference of two numbers as large as the other
    gradients: rounding is theirs.
    """
    return float(true.detach().abs().max()) or max(float(other.detach().abs().max()) for other in truths)


CASES = {
    "one token": {"lengths": [1]},
    "one document": {"lengths": [13]},
    "a prime of documents": {"lengths": [3, 1, 7, 2, 5]},
    "one under and one over a block": {"lengths": [127, 129]},
    "window": {"lengths": [9, 1, 6], "window": 4},
    "window of one": {"lengths": [5, 4], "window": 1},
    "window longer than documents": {"lengths": [5, 4], "window": 6},
    "no groups": {"lengths": [4, 6], "num_groups": 4},
    "one key head": {"lengths": [4, 6], "num_groups": 1},
    "narrow values": {"lengths": [4, 6], "width": 24, "value_width": 16},
    "odd width": {"lengths": [4, 6], "width": 7},
    "soft cap": {"lengths": [9, 6], "softcap": 0.7},
    "sinks": {"lengths": [9, 6], "has_sinks": True},
    "sinks and window": {"lengths": [9, 1, 6], "has_sinks": True, "window": 3},
    "soft cap and window": {"lengths": [9, 1, 6], "softcap": 0.7, "window": 3},
}


def split(case):
    case = dict(CASES[case])
    lengths, window, softcap = case.pop("lengths"), case.pop("window", None), case.pop("softcap", None)
    return lengths, window, softcap, case


@pytest.mark.filterwarnings(FLEX_WARNING)
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize(
    ("backend", "dtype"),
    # FlexAttention takes at most float32 on a CPU.
    [
        (b, d)
        for b in ("reference", "sdpa", "flex")
        for d in (torch.float64, torch.float32, torch.bfloat16)
        if (b, d) != ("flex", torch.float64)
    ],
)
def test_backend_agrees_with_the_definition(case, backend, dtype, monkeypatch):
    # So that these short packs have several blocks of queries.
    monkeypatch.setattr(sdpa, "QUERY_ROWS", 8)
    lengths, window, softcap, shape = split(case)
    context = make_context(lengths)
    inputs = make_inputs(context, dtype=dtype, **shape)
    needs_grad = backend != "flex"
    if backend == "sdpa" and (softcap is not None or shape.get("has_sinks")):
        with pytest.raises(BackendError):
            run(backend, inputs, context, window=window, softcap=softcap)
        return
    if backend == "flex":
        inputs = tuple(x.detach() if x is not None else None for x in inputs)
    weight = torch.randn(context.num_tokens, 4, inputs[2].shape[2]).to(dtype) if needs_grad else None
    given = run(backend, inputs, context, window=window, softcap=softcap, weight=weight)
    assert context.reads == {backend: 1}

    exact = [x.detach().double().requires_grad_() if x is not None else None for x in inputs]
    out = one_by_one(*exact, lengths=lengths, window=window, softcap=softcap)
    truth = [out.detach()]
    if needs_grad:
        truth += torch.autograd.grad((out * weight.double()).sum(), [x for x in exact if x is not None])
    # Plain PyTorch in the tested dtype: transformers' eager formula, scores and weights rounded to it.
    plain = plain_attention(inputs, context, window=window, softcap=softcap, weight=weight)
    for ours, theirs, true in zip(given, plain, truth):
        assert ours.dtype == dtype
        ulp = torch.finfo(dtype).eps * largest_value(true, truth) * math.sqrt(true.numel())
        assert distance(ours, true) <= max(2 * distance(theirs, true), ulp)


def plain_attention(inputs, context, *, window, softcap, weight):
    inputs = [x.detach().requires_grad_() if x is not None else None for x in inputs]
    q, k, v, sink = inputs
    repeats = q.shape[1] // k.shape[1]
    mask = context.dense_mask(window=window, dtype=q.dtype)[0, 0]
    score = torch.einsum("qhw,khw->hqk", q, k.repeat_interleave(repeats, 1)) * SCALE
    if softcap is not None:
        score = torch.tanh(score / softcap) * softcap
    score = score + mask
    if sink is not None:
        score = torch.cat([score, sink[:, None, None].expand(-1, score.shape[1], 1)], -1)
    share = score.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)[..., : q.shape[0]]
    out = torch.einsum("hqk,khw->qhw", share, v.repeat_interleave(repeats, 1))
    if weight is None:
        return [out.detach()]
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), [x for x in inputs if x is not None])]


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_strided_inputs_inside_poisoned_buffers_and_two_runs_are_bit_equal(backend):
    context = make_context([5, 8, 3])
    q, k, v, _ = make_inputs(context)
    buffers = []
    for x in (q, k, v):
        buffer = torch.full((x.shape[0] + 4, x.shape[1] + 2, x.shape[2] + 8), float("nan"))
        buffer[2:-2, 1:-1, 4:-4] = x.detach()
        buffers.append(buffer[2:-2, 1:-1, 4:-4].requires_grad_())
    weight = torch.randn(16, 4, 16)
    torch.utils.deterministic.fill_uninitialized_memory = True
    packed = run(backend, (*buffers, None), context, weight=weight)
    again = run(backend, (*buffers, None), context, weight=weight)
    dense = run(backend, (q, k, v, None), context, weight=weight)
    for first, second, third in zip(packed, again, dense):
        assert first.isfinite().all()
        assert torch.equal(first, second)
        torch.testing.assert_close(first, third, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "fault",
    ["lost mask", "lost window", "lost cap", "lost sink", "wrong group"],
)
def test_planted_faults_exceed_the_bound(fault):
    """What the comparison above must be able to see."""
    lengths, window, softcap = [9, 1, 6], 3, 0.7
    context = make_context(lengths)
    q, k, v, sink = make_inputs(context, has_sinks=True)
    truth = one_by_one(q, k, v, sink, lengths=lengths, window=window, softcap=softcap)
    mask = context.dense_mask(window=window)[0, 0]
    arguments = {"mask_TT": mask, "scale": SCALE, "softcap": softcap, "sink_H": sink}
    arguments |= {
        "lost mask": {"mask_TT": torch.ones(16, 16).tril().bool()},
        "lost window": {"mask_TT": context.dense_mask()[0, 0]},
        "lost cap": {"softcap": None},
        "lost sink": {"sink_H": None},
        "wrong group": {},
    }[fault]
    key = k.flip(1) if fault == "wrong group" else k
    assert error(masked_attention(q, key, v, **arguments), truth) > 1e-2


# The flash operators of torch have no CPU kernel: a plain stand-in with their argument lists and their formulas shows
# that ours are called rightly.


def flash_forward(
    q,
    k,
    v,
    start_q,
    start_k,
    max_q,
    max_k,
    dropout,
    is_causal,
    return_debug_mask,
    *,
    scale,
    window_size_left,
    window_size_right,
):
    assert start_q.dtype == start_k.dtype == torch.int32
    assert (dropout, is_causal, return_debug_mask, window_size_right) == (0.0, True, False, 0)
    assert (max_q, max_k) == (int(start_q.diff().max()), int(start_k.diff().max()))
    assert isinstance(max_q, int)
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[-1] % 8 == 0
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    score, value = flash_scores(q, k, v, (start_q, start_k), scale=scale, left=window_size_left)
    lse = score.logsumexp(-1)
    out = ((score - lse[..., None]).exp() @ value).transpose(0, 1).contiguous()
    return out, lse, torch.zeros(2, dtype=torch.int64), torch.empty(0), torch.empty(0)


def flash_backward(
    do,
    q,
    k,
    v,
    out,
    lse,
    start_q,
    start_k,
    max_q,
    max_k,
    dropout,
    is_causal,
    rng_state,
    unused,
    *,
    scale,
    window_size_left,
    window_size_right,
):
    """The backward of flash attention: it knows only p = exp(score - lse) and delta = rowsum(do * out)."""
    assert do.is_contiguous()
    score, value = flash_scores(q, k, v, (start_q, start_k), scale=scale, left=window_size_left)
    repeats = q.shape[1] // k.shape[1]
    p = (score - lse[..., None]).exp()
    do = do.transpose(0, 1)
    delta = (do * out.transpose(0, 1)).sum(-1, keepdim=True)
    ds = p * (do @ value.transpose(1, 2) - delta) * scale
    dq = (ds @ k.repeat_interleave(repeats, 1).transpose(0, 1)).transpose(0, 1)
    dk = (ds.transpose(1, 2) @ q.transpose(0, 1)).transpose(0, 1)
    dv = (p.transpose(1, 2) @ do).transpose(0, 1)
    return dq, *(x.unflatten(1, (k.shape[1], repeats)).sum(2) for x in (dk, dv))


def flash_scores(q, k, v, starts, *, scale, left):
    """Causal to the bottom right: the last query of a document sees its last key."""
    repeats = q.shape[1] // k.shape[1]
    document_q, document_k = (
        torch.bucketize(torch.arange(len(x)), start[1:].long(), right=True) for x, start in zip((q, k), starts)
    )
    place_q, place_k = (
        torch.arange(len(document)) - start[1:].long()[document]
        for document, start in zip((document_q, document_k), starts)
    )
    distance = place_q[:, None] - place_k[None]
    seen = (document_q[:, None] == document_k[None]) & (distance >= 0)
    if left >= 0:
        seen &= distance <= left
    k, v = (x.repeat_interleave(repeats, 1).transpose(0, 1) for x in (k, v))
    return (q.transpose(0, 1) @ k.transpose(1, 2) * scale).masked_fill(~seen, float("-inf")), v


@pytest.fixture
def stand_in_flash(monkeypatch):
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash_backward)


@pytest.mark.parametrize("case", [case for case in CASES if "cap" not in case])
def test_varlen_calls_the_flash_operators_rightly(case, stand_in_flash):
    """In float64 the formulas agree to rounding, sinks and their gradient included."""
    lengths, window, _, shape = split(case)
    context = make_context(lengths)
    inputs = make_inputs(context, dtype=torch.float64, **shape)
    q, k, v, sink = inputs
    if sink is not None:
        # Sinks are folded in float32, as on a GPU.
        sink = sink.detach().float().double().requires_grad_()
    weight = torch.randn(context.num_tokens, 4, v.shape[2]).double()
    leaves = [x for x in (q, k, v, sink) if x is not None]
    out = flash.varlen_attention(q, k, v, context=context, scale=SCALE, window=window, sink_H=sink)
    given = [out, *torch.autograd.grad((out * weight).sum(), leaves)]
    true = one_by_one(q, k, v, sink, lengths=lengths, window=window, softcap=None)
    truth = [true, *torch.autograd.grad((true * weight).sum(), leaves)]
    assert context.num_builds == {"varlen": 1}
    for ours, theirs in zip(given, truth):
        bound = 1e-6 if sink is not None else 1e-12
        assert distance(ours, theirs) <= bound * largest_value(theirs, truth) * math.sqrt(theirs.numel())


PREFIXED_LENGTHS, PREFIXES = (5, 3, 1, 4, 2, 6, 7), (-1, 0, 0, 0, -1, 4, -1)


def prefixed_context():
    return BatchContext(
        lengths=PREFIXED_LENGTHS, label_T=torch.full((sum(PREFIXED_LENGTHS),), -100), num_items=1, prefixes=PREFIXES
    )


def copied_prefixes(x):
    """Each document behind a copy of its prefix, and which rows of the result are the documents' own."""
    rows, own = [], []
    starts = [sum(PREFIXED_LENGTHS[:number]) for number in range(len(PREFIXES))]
    for start, length, prefix in zip(starts, PREFIXED_LENGTHS, PREFIXES):
        if prefix >= 0:
            rows += range(starts[prefix], starts[prefix] + PREFIXED_LENGTHS[prefix])
        own += range(len(rows), len(rows) + length)
        rows += range(start, start + length)
    return x[rows], own


@pytest.mark.filterwarnings(FLEX_WARNING)
@pytest.mark.parametrize("case", ["plain", "window", "sinks", "soft cap"])
@pytest.mark.parametrize("backend", ["reference", "sdpa", "flex", "varlen"])
def test_documents_see_their_prefix(backend, case, stand_in_flash, monkeypatch):
    monkeypatch.setattr(sdpa, "QUERY_ROWS", 4)
    context = prefixed_context()
    window, softcap = 4 if case == "window" else None, 0.7 if case == "soft cap" else None
    dtype = torch.float32 if backend == "flex" else torch.float64
    inputs = make_inputs(context, dtype=dtype, has_sinks=case == "sinks")
    lengths = [
        length + (0 if prefix < 0 else PREFIXED_LENGTHS[prefix]) for length, prefix in zip(PREFIXED_LENGTHS, PREFIXES)
    ]
    q, k, v, sink = inputs
    if backend == "varlen":
        if softcap is not None:
            pytest.skip("varlen has no soft cap")
        # Sinks are folded in float32.
        sink = sink if sink is None else sink.detach().float().double().requires_grad_()
        keys, values = (gather_keys(x, context.prefix_keys) for x in (k, v))
        out = flash.varlen_attention(q, keys, values, context=context, scale=SCALE, window=window, sink_H=sink)
    elif backend == "sdpa" and case in ("sinks", "soft cap"):
        pytest.skip("sdpa has neither sinks nor soft caps")
    else:
        heads = (x if x is None or backend != "flex" else x.detach() for x in inputs)
        out = packed_attention(
            *itertools.islice(heads, 3), context=context, scale=SCALE, window=window, softcap=softcap,
            sink_H=sink if sink is None or backend != "flex" else sink.detach(), backend=backend,
        )  # fmt: skip
    copies = [copied_prefixes(x) for x in (q, k, v)]
    true = one_by_one(*(x for x, _ in copies), sink, lengths=lengths, window=window, softcap=softcap)[copies[0][1]]
    bound = {"flex": 1e-6, "varlen": 1e-6 if sink is not None else 1e-12}.get(backend, 1e-12)
    assert distance(out, true) <= bound * float(true.detach().norm())
    if backend == "flex":
        return
    leaves = [x for x in (q, k, v, sink) if x is not None]
    weight = torch.randn_like(true)
    given, truth = (torch.autograd.grad((x * weight).sum(), leaves) for x in (out, true))
    for ours, theirs in zip(given, truth):
        assert distance(ours, theirs) <= bound * largest_value(theirs, truth) * math.sqrt(theirs.numel())


@pytest.mark.filterwarnings(FLEX_WARNING)
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("backend", ["reference", "sdpa", "flex"])
def test_tokens_of_a_span_see_its_end(backend, window, monkeypatch):
    monkeypatch.setattr(sdpa, "QUERY_ROWS", 4)
    lengths, ranges = [7, 13, 5], [(1, 6), (9, 18)]
    context = BatchContext(lengths=lengths, label_T=torch.full((25,), -100), num_items=1)
    context.spans = BidirectionalSpans.build(ranges, in_windows_only=False, document_T=context.document_T)
    dtype = torch.float32 if backend == "flex" else torch.float64
    q, k, v, _ = make_inputs(context, dtype=dtype, has_sinks=False)
    if backend == "flex":
        q, k, v = (x.detach() for x in (q, k, v))
    out = packed_attention(
        q, k, v, context=context, scale=SCALE, window=window, softcap=None, sink_H=None, backend=backend
    )
    seen = torch.block_diag(*(torch.ones(length, length).tril() for length in lengths)).bool()
    for begin, end in ranges:
        seen[begin:end, begin:end] = True
    index = torch.arange(25)
    seen &= index[:, None] - index[None] < (window or 25)
    repeats = q.shape[1] // k.shape[1]
    score = torch.einsum("qhw,khw->hqk", q, k.repeat_interleave(repeats, 1)) * SCALE
    weight = score.masked_fill(~seen, -torch.inf).softmax(-1)
    true = torch.einsum("hqk,khw->qhw", weight, v.repeat_interleave(repeats, 1))
    assert distance(out, true) <= (1e-6 if backend == "flex" else 1e-12) * float(true.detach().norm())


def test_cudnn_is_not_chosen_for_prefixes():
    need = H200._replace(has_cudnn=True, document_length=8192)
    assert choose_backend(need) == "cudnn"
    assert choose_backend(need._replace(has_prefixes=True)) == "varlen"


def test_sinks_are_folded_in_fp32_and_leave_what_is_remembered(monkeypatch):
    """The output is rounded once, the sink's gradient sums exact products; what the plan of memory remembers is
    read again by the next run.
    """

    def no_gradients(d_out, q, k, v, *_, **__):
        return tuple(torch.zeros_like(x) for x in (q, k, v))

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", no_gradients)
    context = make_context([9, 6])
    q, k, v, sink = make_inputs(context, dtype=torch.bfloat16, has_sinks=True)
    sink = sink.detach().float().requires_grad_()
    remembered = (torch.randn_like(q).detach(), torch.randn(4, 15), torch.zeros(2), torch.empty(0))
    kept = [tensor.clone() for tensor in remembered]
    out = flash.varlen_attention(
        q, k, v, context=context, scale=SCALE, window=None, sink_H=sink, remember=lambda compute: remembered
    )
    total_HT = torch.logaddexp(kept[1], sink.detach()[:, None])
    assert torch.equal(out, (kept[0] * torch.exp(kept[1] - total_HT).t()[..., None]).bfloat16())
    assert all(torch.equal(one, other) for one, other in zip(remembered, kept))

    d_out = torch.randn_like(out)
    (d_sink,) = torch.autograd.grad(out, sink, d_out)
    delta_HT = (d_out.double() * out.detach().double()).sum(-1).t()
    truth = -(torch.exp(sink.detach()[:, None] - total_HT) * delta_HT).sum(1)
    torch.testing.assert_close(d_sink.double(), truth, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_the_flash_operators_have_the_arguments_that_are_passed(name):
    """Run on every torch version of the CI: a changed argument list shows here, not on a GPU."""
    schema = getattr(torch.ops.aten, f"_flash_attention_{name}").default._schema
    positional = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    keyword = {argument.name for argument in schema.arguments if argument.kwarg_only}
    expected = {
        "forward": "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask",
        "backward": "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal "
        "rng_state unused",
    }[name]
    assert positional == expected.split()
    assert {"scale", "window_size_left", "window_size_right"} <= keyword
    assert len(schema.returns) == {"forward": 5, "backward": 3}[name]


def test_forcing_cudnn_where_only_the_package_is_missing_says_so():
    with pytest.raises(MissingDependencyError, match=r"lightning-fastft\[hopper\]"):
        _check_forced("cudnn", H200)
    with pytest.raises(BackendError, match="has no sinks"):
        _check_forced("cudnn", H200._replace(has_sinks=True))


# The choice

H200 = AttentionNeed(
    device_type="cuda",
    capability=(9, 0),
    dtype=torch.bfloat16,
    head_width=128,
    value_width=128,
    has_window=False,
    has_softcap=False,
    has_sinks=False,
    needs_grad=True,
    document_length=600,
    num_tokens=8192,
    has_cudnn=False,
)
CPU = H200._replace(device_type="cpu", capability=(0, 0), dtype=torch.float32)


@pytest.mark.parametrize(
    ("need", "changes", "backend"),
    [
        (H200, {}, "tiled"),
        (H200, {"document_length": 8192}, "tiled"),
        (H200, {"has_prefixes": True}, "varlen"),
        (H200, {"head_width": 96, "value_width": 96}, "varlen"),
        (H200, {"value_width": 64}, "varlen"),
        (H200, {"capability": (10, 0)}, "varlen"),
        (H200, {"dtype": torch.float16, "capability": (8, 6)}, "varlen"),
        (H200, {"has_window": True, "has_sinks": True}, "tiled"),
        (H200, {"has_softcap": True}, "flex"),
        (H200, {"dtype": torch.float32}, "sdpa"),
        (H200, {"dtype": torch.float32, "has_sinks": True}, "flex"),
        (H200, {"dtype": torch.float64, "has_sinks": True, "head_width": 8, "value_width": 8}, "reference"),
        (H200, {"capability": (7, 5), "dtype": torch.float16}, "sdpa"),
        (H200, {"capability": (7, 5), "dtype": torch.float16, "has_sinks": True}, "reference"),
        (H200, {"head_width": 512, "value_width": 512}, "sdpa"),
        (H200, {"has_spans": True}, "sdpa"),
        (H200, {"has_spans": True, "has_cudnn": True, "document_length": 4096}, "sdpa"),
        (H200, {"has_spans": True, "has_softcap": True}, "flex"),
        (H200, {"has_cudnn": True}, "tiled"),
        (H200, {"has_cudnn": True, "document_length": 4096}, "cudnn"),
        (H200, {"has_cudnn": True, "document_length": 4096, "num_tokens": 8190}, "tiled"),
        (H200, {"has_cudnn": True, "document_length": 4096, "head_width": 64, "value_width": 64}, "tiled"),
        (H200, {"has_cudnn": True, "document_length": 4096, "has_sinks": True}, "tiled"),
        (H200, {"has_cudnn": True, "document_length": 4096, "capability": (8, 0)}, "varlen"),
        (CPU, {}, "sdpa"),
        (CPU, {"has_softcap": True}, "reference"),
        (CPU, {"has_sinks": True, "needs_grad": False}, "reference"),
        (CPU, {"device_type": "mps"}, "sdpa"),
    ],
)
def test_choice(need, changes, backend):
    need = need._replace(**changes)
    assert choose_backend(need) == backend
    assert find_obstacle(backend, need) == ""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("need", [H200, CPU])
def test_a_forced_backend_is_taken_or_refused_with_the_reason(backend, need):
    obstacle = find_obstacle(backend, need)
    assert (obstacle == "") == (
        backend
        in {"cuda": ("tiled", "varlen", "flex", "sdpa", "reference"), "cpu": ("sdpa", "reference")}[need.device_type]
    )


@pytest.mark.parametrize("backend", ["tiled", "varlen", "cudnn", "flex"])
def test_a_forced_backend_that_cannot_is_an_error_that_names_the_others(backend):
    context = make_context([4])
    q, k, v, _ = make_inputs(context)
    with pytest.raises(BackendError, match=f"'{backend}' .*Able to do this: 'sdpa', 'reference'"):
        packed_attention(q, k, v, context=context, scale=1.0, window=None, softcap=None, sink_H=None, backend=backend)
    assert context.num_reads == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v, s: (q[:-1], k, v, s), "q_THW has 9 tokens, the context describes 10"),
        (lambda q, k, v, s: (q, k[:, :, :8], v, s), "Heads do not fit"),
        (lambda q, k, v, s: (q[:, :3], k, v, s), "Heads do not fit"),
        (lambda q, k, v, s: (q, k, v[:, :1], s), "Heads do not fit"),
        (lambda q, k, v, s: (q[None], k, v, s), "3 axes"),
        (lambda q, k, v, s: (q, k.double(), v, s), "dtype"),
        (lambda q, k, v, s: (q, k, v, s[:2]), "sink_H"),
        (lambda q, k, v, s: (q.to("meta"), k.to("meta"), v.to("meta"), s), r"batch\.to\(device\)"),
    ],
)
def test_wrong_shapes_are_refused(change, message):
    context = make_context([4, 6])
    q, k, v, sink = change(*make_inputs(context, has_sinks=True))
    with pytest.raises(ShapeError, match=message):
        packed_attention(
            q, k, v, context=context, scale=1.0, window=None, softcap=None, sink_H=sink, backend="reference"
        )


@pytest.mark.parametrize(
    "arguments", [{"backend": "sdp"}, {"window": 0, "backend": "sdpa"}, {"window": 0, "backend": "reference"}]
)
def test_wrong_options_are_refused(arguments):
    context = make_context([4])
    q, k, v, _ = make_inputs(context)
    with pytest.raises(OptionError):
        packed_attention(
            q, k, v, **{"context": context, "scale": 1.0, "window": None, "softcap": None, "sink_H": None, **arguments}
        )
