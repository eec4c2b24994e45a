"""Attention on a GPU: every backend of every claimed family against float32 and float64, which backend ran, and
no host wait in a step.
"""

import importlib.util
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from lightning_fastft.core.errors import BackendError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.hf.families import FAMILIES, decoder_layers
from lightning_fastft.kernels.attention import cudnn_backend
from lightning_fastft.kernels.attention.op import packed_attention
from lightning_fastft.packing.context import BatchContext
from lightning_fastft.patches.attention import install_attention
from tests.support.packs import make_batch
from tests.support.sizes import sizes
from tests.support.tiny_models import MOE, TINY, build_tiny

pytestmark = pytest.mark.gpu

LENGTHS = (130, 1, 257, 64, 37)
WINDOW = 48
WIDTHS = sizes(width=256, inner=128, heads=4, key_heads=2, head_width=64, positions=512)
OVERRIDES = {
    "deepseek_v3": dict(
        WIDTHS,
        num_key_value_heads=4,
        head_dim=16,
        qk_rope_head_dim=16,
        qk_nope_head_dim=48,
        v_head_dim=32,
        moe_intermediate_size=64,
    ),
}
PAIRS = [(name, backend) for name, (model_type, _) in TINY.items() for backend in FAMILIES[model_type]]


def build_on_gpu(name, *, experts=None):
    overrides = dict(OVERRIDES.get(name, WIDTHS))
    if "sliding_window" in TINY[name][1] and TINY[name][1]["sliding_window"] is not None:
        overrides["sliding_window"] = WINDOW
    model = build_tiny(name, experts=experts, **overrides)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(0.5)
            # Every arm sees the same bf16 weights.
            parameter.copy_(parameter.bfloat16().float())
    return model.cuda()


def needs_cudnn(backend):
    if backend == "cudnn" and importlib.util.find_spec("cudnn") is None:
        pytest.skip("needs nvidia-cudnn-frontend")


class Recorded(nn.Module):
    """Arguments with which the first and the last attention layer were called."""

    def __init__(self, model, batch):
        super().__init__()
        self.calls = []
        layers = decoder_layers(model)
        hooks = [
            layers[i].self_attn.register_forward_pre_hook(self.record, with_kwargs=True) for i in (0, len(layers) - 1)
        ]
        with torch.no_grad():
            model(**batch)
        for hook in hooks:
            hook.remove()

    def record(self, module, args, kwargs):
        self.calls.append((module, args, dict(kwargs)))


def cast(value, dtype):
    if torch.is_tensor(value) and value.is_floating_point():
        return value.detach().to(dtype)
    if isinstance(value, tuple):
        return tuple(cast(item, dtype) for item in value)
    if isinstance(value, Mapping):
        return {key: cast(item, dtype) for key, item in value.items()}
    return value


def replay(call, *, dtype, backend, context, weight):
    """Run one attention layer in that dtype: output, gradient of its input, gradients of its parameters."""
    module, args, kwargs = call
    kwargs = {name: cast(value, dtype) for name, value in kwargs.items()}
    args = [cast(value, dtype) for value in args]
    hidden = args[0] if args else kwargs["hidden_states"]
    hidden.requires_grad_()
    config, installed = module.config, module.config._attn_implementation
    if backend == "eager":
        window = kwargs["attention_mask"]._arguments.get("local_size")
        kwargs["attention_mask"] = context.dense_mask(window=window, dtype=dtype)
        config._attn_implementation_internal = "eager"
    else:
        context.attention_backend = backend
    kwargs["context"] = context
    module = module.to(dtype)
    try:
        out = module(*args, **kwargs)[0]
    finally:
        config._attn_implementation_internal = installed
    names, parameters = zip(*[(name, p) for name, p in module.named_parameters() if p.requires_grad])
    gradients = torch.autograd.grad((out * weight.to(dtype)).sum(), [hidden, *parameters], allow_unused=True)
    return dict(zip(("out", "hidden", *names), (out.detach(), *gradients)))


@pytest.mark.slow(12)
@pytest.mark.parametrize(("name", "backend"), PAIRS)
def test_backend_of_family_within_twice_the_error_of_plain_bf16(name, backend):
    """Attention layers with the inputs that the whole model gives them; layers one by one, so that no router can
    choose otherwise in bf16.
    """
    needs_cudnn(backend)
    model = build_on_gpu(name)
    install_attention(model, ModelPatcher())
    batch = make_batch(LENGTHS, pad_to=512).to("cuda")
    batch.context.attention_backend = "reference"
    recorded = Recorded(model, batch)
    assert len(recorded.calls) == 2
    for call in recorded.calls:
        weight = torch.randn(1, 512, model.config.hidden_size, device="cuda").bfloat16().float()
        contexts = [make_batch(LENGTHS, pad_to=512).context.to("cuda") for _ in range(3)]
        # Inputs rounded to bf16 first: the truth is the exact result for what the other arms are given.
        call = (
            call[0],
            [cast(value, torch.bfloat16) for value in call[1]],
            {key: cast(value, torch.bfloat16) for key, value in call[2].items()},
        )
        truth = replay(call, dtype=torch.float32, backend="eager", context=contexts[0], weight=weight)
        plain = replay(call, dtype=torch.bfloat16, backend="eager", context=contexts[1], weight=weight)
        ours = replay(call, dtype=torch.bfloat16, backend=backend, context=contexts[2], weight=weight)
        assert contexts[2].reads == {backend: 1}
        call[0].float()
        for key, true in truth.items():
            if true is None or float(true.norm()) == 0:
                continue
            plain_error, our_error = (float((x[key].float() - true).norm() / true.norm()) for x in (plain, ours))
            assert ours[key].isfinite().all()
            assert our_error <= max(2 * plain_error, 2**-8), (key, our_error, plain_error)


@pytest.mark.parametrize("num_groups", [1, 2])
def test_cudnn_is_as_near_as_flash_for_long_documents_between_other_heads(monkeypatch, num_groups):
    """The length and the layout in which its gradients were once NaN: heads of one token between each other,
    16,384, 8,192 and 8,192 tokens; the backward in one group of heads, and in two.
    """
    needs_cudnn("cudnn")
    lengths, width = (16_384, 8_192, 8_192), 128
    workspace_bytes = cudnn_backend._WORKSPACE_PER_VALUE * sum(lengths) * 8 * width
    monkeypatch.setattr(cudnn_backend, "_GROUP_WORKSPACE_BYTES", workspace_bytes / num_groups)
    joint = torch.randn(sum(lengths), 12, width, device="cuda").bfloat16()
    weight = torch.randn(sum(lengths), 8, width, device="cuda").bfloat16()

    def run(backend):
        context = make_batch(lengths).context.to("cuda")
        context.attention_backend = backend
        rows = joint.clone().requires_grad_()
        out = packed_attention(
            *rows.split((8, 2, 2), dim=1), context=context, scale=width**-0.5, window=None, softcap=None, sink_H=None
        )
        out.backward(weight)
        return out.detach(), *rows.grad.split((8, 2, 2), dim=1)

    for name, one, other in zip(("out", "q", "k", "v"), run("cudnn"), run("varlen"), strict=True):
        distance = float((one.float() - other.float()).norm() / other.float().norm())
        assert distance <= 2**-6, f"{name}: {distance}"


@pytest.mark.parametrize("name", list(TINY))
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_step_never_waits_for_the_device(name, recomputes):
    """Whole models in bf16 on the backend that is chosen: forward, backward and optimizer step under
    set_sync_debug_mode("error").
    """
    import functools

    model = build_on_gpu(name, experts="grouped_mm" if name in MOE else None).bfloat16().train()
    install_attention(model, ModelPatcher())
    if recomputes:
        checkpoint = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False, preserve_rng_state=False)
        model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    # Compilation, workspaces and optimizer state come with the first steps.
    for seed in range(2):
        step(make_batch(LENGTHS, seed=seed, pad_to=512).pin_memory().to("cuda", non_blocking=True))
    batch = make_batch(LENGTHS, seed=2, pad_to=512).pin_memory()
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = batch.to("cuda", non_blocking=True)
        loss = step(batch)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert loss.isfinite()
    # Heads of other widths than 64, and values narrower than keys, are for torch's kernels.
    others = {
        "gemma2": {"flex"}, "deepseek_v3": {"varlen"}, "gemma4": {"tiled", "varlen"}, "gemma4_shared": {"varlen"},
    }  # fmt: skip
    assert batch.context.reads.keys() == others.get(name, {"tiled"})
    assert sum(batch.context.reads.values()) == (4 if recomputes else 2)
    assert all(count == 1 for kind, count in batch.context.num_builds.items() if kind == "varlen")
    assert not batch.context.num_builds["dense_mask"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 48])
@pytest.mark.parametrize("backend", ["tiled", "varlen", "flex", "reference"])
def test_sinks_have_exact_gradients(dtype, window, backend):
    """Against float64; measured on one H200 in bf16: 2.6e-3 to 3.0e-3 for varlen."""
    context = make_batch(LENGTHS, pad_to=512).context.to("cuda")
    q, k, v = (torch.randn(512, heads, 64, device="cuda").to(dtype).requires_grad_() for heads in (8, 2, 2))
    sink = torch.randn(8, device="cuda").to(dtype).requires_grad_()
    weight = torch.randn(512, 8, 64, device="cuda").to(dtype)

    def run(backend, leaves, weight):
        out = packed_attention(
            *leaves[:3], context=context, scale=0.125, window=window, softcap=None, sink_H=leaves[3], backend=backend
        )
        return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]

    given = run(backend, [q, k, v, sink], weight)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, sink)]
    truth = run("reference", exact, weight.double())
    for ours, true in zip(given, truth):
        assert float((ours.double() - true).norm() / true.norm()) <= (6e-3 if dtype is torch.bfloat16 else 1e-3)
    assert context.reads[backend] >= 1


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 6e-3), (torch.float16, 1e-3), (torch.float32, 1e-5)])
@pytest.mark.parametrize("num_groups", [8, 2])
def test_wide_heads_read_document_offsets(dtype, bound, num_groups):
    """Global layers of Gemma 4 have heads of 512; flash attention takes 256."""
    lengths = (190, 1, 64, 2, 255)
    context = make_batch(lengths).context.to("cuda")
    q, k, v = (
        torch.randn(512, heads, 512, device="cuda").to(dtype).requires_grad_() for heads in (8, *[num_groups] * 2)
    )
    weight = torch.randn(512, 8, 512, device="cuda").to(dtype)

    def run(backend, leaves, weight):
        options = {"scale": 512**-0.5, "window": None, "softcap": None, "sink_H": None}
        out = packed_attention(*leaves, context=context, backend=backend, **options)
        return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]

    given = run("auto", [q, k, v], weight)
    assert context.reads == {"sdpa": 1}
    assert not context.num_builds["dense_mask"]
    truth = run("reference", [x.detach().double().requires_grad_() for x in (q, k, v)], weight.double())
    for ours, true in zip(given, truth):
        assert float((ours.double() - true).norm() / true.norm()) <= bound


@pytest.mark.parametrize("backend", ["tiled", "varlen", "flex", "sdpa", "reference"])
@pytest.mark.parametrize("width", [64, 128])
def test_pad_documents_and_poisoned_memory_give_no_nan_and_runs_are_close(backend, width):
    context = make_batch((200, 5), pad_to=384).context.to("cuda")
    q, k, v = (torch.randn(384, heads, width, device="cuda").bfloat16().requires_grad_() for heads in (4, 2, 2))
    # The allocator hands out what was full of NaN.
    poison = [torch.full((384, 64, 256), float("nan"), device="cuda") for _ in range(4)]
    del poison
    out = packed_attention(
        q, k, v, context=context, scale=width**-0.5, window=None, softcap=None, sink_H=None, backend=backend
    )
    gradients = torch.autograd.grad(out.float().square().sum(), [q, k, v])
    assert all(x.isfinite().all() for x in (out, *gradients))
    again = packed_attention(
        q, k, v, context=context, scale=width**-0.5, window=None, softcap=None, sink_H=None, backend=backend
    )
    assert torch.equal(out, again)


@pytest.mark.parametrize("backend", ["tiled", "varlen", "flex", "sdpa", "reference"])
def test_another_document_changes_nothing(backend):
    context = make_batch(LENGTHS).context.to("cuda")
    first = [torch.randn(sum(LENGTHS), heads, 64, device="cuda").bfloat16() for heads in (4, 2, 2)]
    rows = slice(131, 131 + 257)
    second = [x.clone() for x in first]
    for x in second:
        x[rows] = torch.randn_like(x[rows])
    outs = [
        packed_attention(*x, context=context, scale=0.125, window=None, softcap=None, sink_H=None, backend=backend)
        for x in (first, second)
    ]
    difference = (outs[0] - outs[1]).abs()
    assert difference[rows].max() > 0
    difference[rows] = 0
    assert difference.max() == 0


@pytest.mark.parametrize("backend", ["tiled", "varlen"])
@pytest.mark.parametrize("has_sink", [False, True])
@pytest.mark.parametrize("width", [64, 128])
def test_shares_of_keys_and_values_add_up_to_their_gradients(width, has_sink, backend):
    torch.manual_seed(0)
    context = BatchContext(lengths=list(LENGTHS), label_T=torch.full((sum(LENGTHS),), -100), num_items=1).to("cuda")
    q, k, v = (
        torch.randn(sum(LENGTHS), count, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for count in (6, 2, 2)
    )
    sink = torch.randn(6, device="cuda").requires_grad_() if has_sink else None
    found = []
    arguments = {
        "context": context,
        "scale": width**-0.5,
        "window": None,
        "softcap": None,
        "sink_H": sink,
        "backend": backend,
    }
    leaves = [q, k, v, *([sink] if has_sink else [])]
    outs, gradients = [], []
    for collect in (None, lambda *shares: found.extend(shares)):
        out = packed_attention(q, k, v, **arguments, collect=collect)
        outs.append(out.detach())
        gradients.append(torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True))
    assert torch.equal(*outs)
    (d_q, d_k, d_v, *d_sink), (own_q, none_k, none_v, *own_sink) = gradients
    assert none_k is None
    assert none_v is None
    assert [share.shape for share in found] == [q.shape, q.shape]
    sums = (share.float().unflatten(1, (2, 3)).sum(dim=2) for share in found)
    for one, other in zip((own_q, *sums, *own_sink), (d_q, d_k, d_v, *d_sink), strict=True):
        # One rounding of the sum, and the order in which the kernel adds.
        torch.testing.assert_close(one.float(), other.float(), rtol=2**-7, atol=2**-7)


def test_what_varlen_cannot_do_is_refused():
    context = make_batch(LENGTHS).context.to("cuda")
    q = torch.randn(sum(LENGTHS), 2, 64, device="cuda")
    for x, softcap in ((q, None), (q.bfloat16(), 30.0)):
        with pytest.raises(BackendError, match="'varlen'"):
            packed_attention(
                x, x, x, context=context, scale=1.0, window=None, softcap=softcap, sink_H=None, backend="varlen"
            )


def test_varlen_memory_is_linear_in_the_pack():
    def peak(num_tokens):
        context = BatchContext(
            lengths=[512] * (num_tokens // 512), label_T=torch.full((num_tokens,), -100), num_items=1
        ).to("cuda")
        q = torch.randn(num_tokens, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        packed_attention(q, q, q, context=context, scale=0.1, window=None, softcap=None, sink_H=None).sum().backward()
        return torch.cuda.max_memory_allocated() - before

    assert peak(32768) <= 5 * peak(8192)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3_text", "gpt_oss"])
def test_generates_the_tokens_of_eager_attention(name):
    model = build_on_gpu(name).eval()
    inputs = {
        "input_ids": torch.randint(3, 97, (2, 12), device="cuda"),
        "attention_mask": torch.ones(2, 12, dtype=torch.long, device="cuda"),
    }
    inputs["attention_mask"][1, :5] = 0
    expected = model.generate(**inputs, max_new_tokens=16, do_sample=False, eos_token_id=None)
    install_attention(model, ModelPatcher())
    assert torch.equal(model.generate(**inputs, max_new_tokens=16, do_sample=False, eos_token_id=None), expected)
