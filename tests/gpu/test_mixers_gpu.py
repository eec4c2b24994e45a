"""Hybrids on a GPU: packed documents on kernels against transformers' PyTorch code on each document."""

import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model

pytest.importorskip("fla", reason="needs fla-core")

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.hf.mixers import find_mixers, mixer_family
from lightning_fastft.mixers.install import ON_KERNELS, install_mixers
from lightning_fastft.mixers.kernels import without_kernels
from lightning_fastft.patches.packed import install_packed_training
from tests.support.host_waits import waits_are_errors
from tests.support.packs import make_batch, make_documents, run_packed, summed_loss, take_gradients
from tests.support.tiny_models import build_tiny
from tests.support.truth import relative_error

pytestmark = pytest.mark.gpu

LENGTHS = (7, 1, 130, 2, 64)
NAMES = (
    "lfm2",
    "qwen3_next",
    "qwen3_5_text",
    "olmo_hybrid",
    "kimi_linear",
    "nemotron_h_hybrid",
    "granitemoehybrid",
    "falcon_h1",
    "bamba",
    "zamba2",
)
# One of each kind of mixer.
KINDS = ("lfm2", "qwen3_5_text", "kimi_linear", "bamba")
# Sums of float32 in another order, through two layers and their backward; products in TF32 are off by 1e-2.
BOUND = 2e-4


@pytest.fixture(autouse=True)
def keep_tf32_out_of_the_truth():
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def build(name):
    """A model on the device, and its mixers."""
    model = build_tiny(name).cuda()
    return model, find_mixers(model, mixer_family(model))


def run_alone(model, *, num_items):
    """Logits and gradients by transformers' PyTorch code, each document in a forward of its own."""
    logits = []
    for document in make_documents(LENGTHS):
        ids, labels = (torch.as_tensor(x, device="cuda") for x in (document.input_ids, document.labels))
        logits.append(model(input_ids=ids[None], use_cache=False).logits[0])
        (summed_loss(logits[-1], labels) / num_items).backward()
    return {"logits": torch.cat(logits).detach(), **take_gradients(model)}


@pytest.mark.slow(30)
@pytest.mark.parametrize("policy", ["keep", "recompute"])
@pytest.mark.parametrize("name", NAMES)
def test_packed_documents_are_computed_as_each_alone(name, policy):
    compare(*build(name), policy=policy)


@pytest.mark.parametrize("policy", ["keep", "recompute"])
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("lfm2", ["in_proj", "out_proj"]),
        ("qwen3_5_text", ["in_proj_qkv", "out_proj"]),
        ("kimi_linear", ["k_proj", "o_proj", "b_proj"]),
        ("bamba", ["in_proj"]),
    ],
)
def test_adapters_of_mixers_get_exact_gradients(name, targets, policy):
    model, _ = build(name)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=targets))
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    gradients = compare(model, find_mixers(model, mixer_family(model)), policy=policy)
    assert any("lora_B" in key for key in gradients)


def compare(model, mixers, *, policy):
    """Packed against one by one; return the gradients of the packed batch."""
    batch = make_batch(LENGTHS).to("cuda")
    install_packed_training(model, patcher := ModelPatcher(), checkpointing=OffloadCheckpointing(policy))
    batch.context.output_logits = True
    _, logits = run_packed(model, batch)
    gradients = take_gradients(model)
    assert batch.context.reads[ON_KERNELS] >= len(mixers) > 0
    patcher.undo()
    for mixer in mixers:
        # transformers would take fla-core's kernels for the documents too.
        mixer.forward = functools.partial(without_kernels(type(mixer).forward), mixer)
    truth = run_alone(model, num_items=batch.context.num_items)
    found = {"logits": logits, **gradients}
    assert found.keys() == truth.keys()
    errors = {name: relative_error(found[name], true) for name, true in truth.items()}
    print(f"largest error {max(errors.values()):.2g}")
    assert max(errors.values()) < BOUND, {name: error for name, error in errors.items() if error >= BOUND}
    return gradients


@pytest.mark.parametrize("name", KINDS)
def test_bf16_is_as_close_to_the_truth_as_plain_bf16(name):
    model, mixers = build(name)
    context = make_batch(LENGTHS).to("cuda").context
    install_mixers(model, patcher := ModelPatcher())
    mixer, x = mixers[0].bfloat16(), torch.randn(1, sum(LENGTHS), 32, device="cuda").bfloat16()
    value = mixer(hidden_states=x, context=context)
    patcher.undo()
    plain = without_kernels(type(mixer).forward)

    def alone(mixer, x):
        return torch.cat([plain(mixer, part) for part in x.split(LENGTHS, dim=1)], dim=1)

    in_bf16 = alone(mixer, x)
    truth = alone(mixer.double(), x.double())
    assert relative_error(value, truth) <= 2 * relative_error(in_bf16, truth)


@pytest.mark.parametrize("name", NAMES)
def test_a_mixer_never_waits_for_the_device(name):
    model, mixers = build(name)
    install_mixers(model, ModelPatcher())

    def step(context):
        mixers[0](hidden_states=torch.ones(1, sum(LENGTHS), 32, device="cuda"), context=context).sum().backward()

    # Kernels are compiled and tuned in the first step.
    step(make_batch(LENGTHS).to("cuda").context)
    batch = make_batch(LENGTHS).to("cuda")
    torch.cuda.synchronize()
    with waits_are_errors():
        step(batch.context)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5_text", "bamba"])
def test_a_step_never_waits_for_the_device(name):
    model, _ = build(name)
    install_packed_training(model, ModelPatcher())
    # Kernels are compiled and tuned in the first step.
    model(**make_batch(LENGTHS).to("cuda")).loss.backward()
    batch = make_batch(LENGTHS).to("cuda")
    torch.cuda.synchronize()
    with waits_are_errors():
        model(**batch).loss.backward()
