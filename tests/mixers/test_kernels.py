"""A mixer on packed kernels: its own code in one call on the whole pack, with functions that know the documents.

The functions here are transformers' own on each document; tests/gpu/test_mixers_gpu.py runs those of fla-core.
"""

import inspect
import sys
import types

import pytest
import torch
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.hf.mixers import MIXERS, find_mixers, mixer_family
from lightning_fastft.mixers import install, mamba2
from lightning_fastft.mixers.install import install_mixers
from lightning_fastft.mixers.kernels import KINDS, find_kernels, run_on_kernels
from tests.support.packs import assert_close, make_batch
from tests.support.tiny_models import HYBRIDS, build_tiny

LENGTHS = (7, 1, 12, 2, 9)
# The recurrence of a kind, by the name that transformers' code calls.
RULES = {
    "gated delta rule": "torch_chunk_gated_delta_rule",
    "Kimi delta attention": "chunk_kimi_delta_attention",
}
NAMES = [name for name, (model_type, _) in HYBRIDS.items() if MIXERS[model_type].kind in KINDS]


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


def first_mixer(model):
    return find_mixers(model, mixer_family(model))[0]


def by_document(mixer, kind):
    """transformers' functions on each document, under the names that the mixer's code calls; for the scan of Mamba-2
    our own, which on a CPU is its plain twin.
    """
    home = inspect.unwrap(type(mixer).forward).__globals__

    def convolve(x, *args, context, **keywords):
        parts = x.split(context.lengths, dim=2)
        # As the kernel returns it: the channels of a token are contiguous.
        return torch.cat([home["causal_conv1d_fn"](part, *args, **keywords).mT for part in parts], dim=1).mT

    def rule(*args, g, beta, context, **keywords):
        parts = zip(*(value.split(context.lengths, dim=1) for value in (*args, g, beta)))
        function = home[RULES[kind]]
        return torch.cat([function(*part[:3], g=part[3], beta=part[4], **keywords)[0] for part in parts], dim=1), None

    rules = {RULES[kind]: rule} if kind in RULES else mamba2.FUNCTIONS if kind == "Mamba-2" else {}
    return {"causal_conv1d_fn": convolve, **rules}


def is_kernel_of_transformers(value):
    """Whether a function is one that transformers exchanges for that of an installed package."""
    return "applicable_params" in getattr(getattr(value, "__code__", None), "co_freevars", ())


def run(mixer, x, **keywords):
    out = mixer(hidden_states=x, **keywords)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in mixer.named_parameters()}
    mixer.zero_grad(set_to_none=True)
    return out.detach().as_subclass(torch.Tensor), gradients


@pytest.mark.parametrize("name", NAMES)
def test_one_call_on_packed_kernels_is_each_document_alone(name, monkeypatch):
    model, context = build_tiny(name), make_batch(LENGTHS).context
    install_mixers(model, ModelPatcher())
    mixer, x = first_mixer(model), torch.randn(1, sum(LENGTHS), 32)
    truth, true_gradients = run(mixer, x, context=context)
    monkeypatch.setattr(install, "find_kernels", lambda family, **_: by_document(mixer, family.kind))
    value, gradients = run(mixer, x.as_subclass(OnGpu), context=context)
    assert context.reads == {install.BY_DOCUMENT: 1, install.ON_KERNELS: 1}
    assert_close(value, truth)
    assert_close(gradients, true_gradients)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next"])
def test_without_fla_a_gpu_is_refused_with_the_line_to_install_it(name, monkeypatch):
    model, context = build_tiny(name), make_batch(LENGTHS).context
    install_mixers(model, ModelPatcher())
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(UnsupportedModelError, match="pip install"):
        first_mixer(model)(hidden_states=torch.zeros(1, 31, 32).as_subclass(OnGpu), context=context)
    assert context.num_reads == 0


@pytest.mark.parametrize("model_type", [name for name, family in MIXERS.items() if family.kind not in KINDS])
def test_mixers_without_a_kernel_are_refused_by_name(model_type):
    with pytest.raises(UnsupportedModelError, match=f"{MIXERS[model_type].class_name}.*one_by_one"):
        find_kernels(MIXERS[model_type])


def test_a_mixer_that_calls_other_functions_is_refused():
    mixer = first_mixer(build_tiny("lfm2"))
    functions = {**by_document(mixer, "short convolution"), "torch_chunk_gated_delta_rule": None}
    with pytest.raises(UnsupportedModelError, match="does not call torch_chunk_gated_delta_rule"):
        run_on_kernels(mixer, functions, torch.zeros(1, 31, 32), context=make_batch(LENGTHS).context)


FLA = ("fla", "fla.modules", "fla.modules.causal_conv1d", "fla.ops", "fla.ops.gated_delta_rule", "fla.ops.kda")


def test_an_activation_that_the_convolution_lacks_is_refused(monkeypatch):
    for name in FLA:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    mixer = first_mixer(build_tiny("bamba", hidden_act="gelu"))
    functions = find_kernels(MIXERS["bamba"])
    with pytest.raises(UnsupportedModelError, match="gelu"):
        run_on_kernels(mixer, functions, torch.zeros(1, 31, 32), context=make_batch(LENGTHS).context)


def test_a_gpu_finds_other_code_before_the_first_step(monkeypatch):
    model = build_tiny("lfm2")
    functions = {**by_document(first_mixer(model), "short convolution"), "torch_chunk_gated_delta_rule": None}
    monkeypatch.setattr(install, "find_kernels", lambda family, **_: functions)
    first_mixer(model).conv.weight = torch.nn.Parameter(first_mixer(model).conv.weight.as_subclass(OnGpu))
    with pytest.raises(UnsupportedModelError, match="does not call torch_chunk_gated_delta_rule"):
        install_mixers(model, patcher := ModelPatcher())
    assert len(patcher) == 0


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5_text", "kimi_linear", "falcon_h1", "jamba"])
def test_a_cpu_calls_no_installed_kernel(name, monkeypatch):
    """transformers takes the functions of any installed package, as it does here, for tensors on a CPU too."""
    model, context = build_tiny(name), make_batch(LENGTHS).context
    mixer, x = first_mixer(model), torch.randn(1, sum(LENGTHS), 32)
    kernels = types.ModuleType("installed_kernels")
    home = inspect.unwrap(type(mixer).forward).__globals__
    for function in [key for key, value in home.items() if is_kernel_of_transformers(value)]:
        setattr(kernels, function, lambda *args, **keywords: pytest.fail("a kernel was called on a CPU"))
        monkeypatch.setitem(sys.modules, "installed_kernels", kernels)
        wrap = use_kernel_func_from_hub_with_fallback(function, "installed_kernels")
        monkeypatch.setitem(home, function, wrap(inspect.unwrap(home[function])))
    with pytest.raises(pytest.fail.Exception):
        mixer(hidden_states=x)
    install_mixers(model, ModelPatcher())
    mixer(hidden_states=x, context=context)
    mixer(hidden_states=x)


def test_transformers_keeps_its_own_functions():
    mixer = first_mixer(build_tiny("lfm2"))
    home = inspect.unwrap(type(mixer).forward).__globals__
    before, own = home["causal_conv1d_fn"], type(mixer).forward
    context = make_batch(LENGTHS).context
    run_on_kernels(mixer, by_document(mixer, "short convolution"), torch.zeros(1, 31, 32), context=context)
    assert home["causal_conv1d_fn"] is before
    assert type(mixer).forward is own


def test_chunks_of_a_pack_end_with_their_documents():
    context = make_batch((3, 64, 130)).context
    chunks = context.chunks(64)
    assert chunks.index_C2.tolist() == [[0, 0], [1, 0], [2, 0], [2, 1], [2, 2]]
    assert chunks.first_S1.tolist() == [0, 1, 2, 5]
    assert context.chunks(64) is chunks
