"""Mixers on their GPU kernels, in Triton's interpreter, against transformers' PyTorch code on each document.

``test_interpreted.py`` runs this file in a process of its own: TRITON_INTERPRET must be set before Triton is first
imported.
"""

import builtins

import pytest
import torch
from triton.runtime import autotuner, interpreter

from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.hf.mixers import MIXERS, find_mixers, mixer_family
from lightning_fastft.kernels.chunk_gradients.reference import CHUNK
from lightning_fastft.kernels.state_scan import op
from lightning_fastft.mixers.delta_rule import delta_rule
from lightning_fastft.mixers.fla_functions import fla_functions
from lightning_fastft.mixers.install import install_mixers
from lightning_fastft.mixers.kernels import KINDS, check_calls, find_kernels, run_on_kernels
from tests.support.host_waits import count_host_waits
from tests.support.packs import assert_close, make_batch
from tests.support.tiny_models import HYBRIDS, build_tiny

pytest.importorskip("fla", reason="needs fla-core")
import fla.ops.common.chunk_delta_h

# Sums of fp32 in another order; a leak is above 1e-2.
BOUND = 5e-5
# Documents of one and two tokens, and one of two chunks.
LENGTHS = (7, 1, 70, 2, 9)
NAMES = [name for name, (model_type, _) in HYBRIDS.items() if MIXERS[model_type].kind in KINDS]
# One of each kind of mixer, with the convolution of seven taps of LFM3, and Falcon-H1, whose projections have factors.
QUICK = [name for name in ("lfm2", "lfm3", "qwen3_5_text", "kimi_linear", "bamba", "falcon_h1") if name in NAMES]


@pytest.fixture(autouse=True)
def kernels_run_here(monkeypatch):
    """Let the scan take tensors on a CPU, and fla-core's kernels run in the interpreter."""
    monkeypatch.setattr(op, "uses_triton", lambda *arguments, **keywords: True)
    # The first of each kernel's configurations: there is nothing to measure.
    monkeypatch.setattr(autotuner.Autotuner, "_bench", lambda *arguments, **keywords: [0.0, 0.0, 0.0])
    # A loop of the interpreter counts in integers of Python, and this kernel casts its counter.
    monkeypatch.setattr(fla.ops.common.chunk_delta_h, "range", count_in_tensors, raising=False)


def count_in_tensors(*bounds):
    return map(interpreter._implicit_cvt, builtins.range(*map(int, bounds)))


def build(name):
    model = build_tiny(name)
    return find_mixers(model, mixer_family(model))[0], model


def run(mixer, call):
    """The mixer's output, and the gradients of its inputs and weights."""
    x = torch.randn(1, sum(LENGTHS), 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    out = call(x)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in mixer.named_parameters()} | {"x": x.grad}
    mixer.zero_grad(set_to_none=True)
    return {"out": out.detach(), **gradients}


def compare(name, fault=lambda functions: functions):
    """Outputs and all gradients of one call on the kernels and of one call for each document."""
    mixer, model = build(name)
    context = make_batch(LENGTHS).context
    functions = fault(find_kernels(mixer_family(model)))
    value = run(mixer, lambda x: run_on_kernels(mixer, functions, x, context=context))
    install_mixers(model, ModelPatcher())
    assert_close(value, run(mixer, lambda x: mixer(hidden_states=x, context=context)), bound=BOUND)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.fault) for name in NAMES]
)
def test_one_call_on_the_kernels_is_each_document_alone(name):
    compare(name)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("name", "leak"),
    [(name, "convolution") for name in QUICK] + [(name, "state") for name in QUICK if not name.startswith("lfm")],
)
def test_a_planted_leak_is_seen(name, leak):
    """The convolution or the recurrence takes the pack for one document."""

    def with_leak(functions):
        leaks = [key for key in functions if ("conv1d_fn" in key) == (leak == "convolution")]
        assert leaks
        return {**functions, **{key: as_one_document(functions[key]) for key in leaks}}

    with pytest.raises(AssertionError, match="\\('"):
        compare(name, with_leak)


def as_one_document(function):
    whole = make_batch((sum(LENGTHS),)).context
    return lambda *arguments, context, **keywords: function(*arguments, context=whole, **keywords)


@pytest.mark.parametrize("name", ["kimi_linear", "bamba"])
def test_no_host_sync(name):
    mixer, model = build(name)
    context, x = make_batch((3, 2)).context, torch.randn(1, 5, 32)
    functions = find_kernels(mixer_family(model))
    with count_host_waits() as waits:
        run_on_kernels(mixer, functions, x, context=context).sum().backward()
    assert waits.total == 0, waits.origin


@pytest.mark.parametrize("name", NAMES)
def test_the_code_of_each_family_calls_what_is_exchanged(name):
    mixer, model = build(name)
    check_calls(type(mixer), find_kernels(mixer_family(model)))


def grad_shapes(device):
    """Shapes and dtypes of the rule's output, saved tensors and gradients, and of the convolution and the norm."""
    chunks = make_batch(LENGTHS).context.to(device).chunks(CHUNK)
    sizes = [(2, 16), (2, 16), (4, 8), (4,), (4,)]
    inputs = [torch.full((sum(LENGTHS), *size), 0.25, device=device).requires_grad_() for size in sizes]
    weight, bias = (torch.ones(*size, device=device).requires_grad_() for size in [(32, 4), (32,)])
    fla = fla_functions(torch.device(device))
    rows = torch.ones(1, sum(LENGTHS), 32, device=device).requires_grad_()
    places = {"cu_seqlens": chunks.start_S1, "chunk_indices": chunks.index_C2, "activation": "silu"}
    outs = [
        delta_rule(*inputs, chunks),
        fla.causal_conv1d(rows, weight, bias, **places)[0],
        fla.l2norm(rows),
    ]
    saved = list(outs[0].grad_fn.saved_tensors)
    sum(out.sum() for out in outs).backward()
    tensors = [*outs, *saved, *(leaf.grad for leaf in (*inputs, weight, bias, rows))]
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


def test_the_meta_device_has_the_shapes_of_fla_core():
    assert grad_shapes("meta") == grad_shapes("cpu")
