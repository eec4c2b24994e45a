"""Value points: what a plan holds is not computed again, and nothing else about a layer changes."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.activations.segments import RECOMPUTE, Segment
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.fused.low_precision_adapters import install_low_precision_adapters
from lightning_fastft.hf.loading.model import build_model
from lightning_fastft.hf.loading.source import ModelSource
from lightning_fastft.patches.packed import install_packed_training
from lightning_fastft.patches.value_points import HeldLinear, install_value_points
from tests.planner.plan_trials import PlannedModel, assert_equal, kept_gradients, random_plan, read_gradients
from tests.support.late_streams import LateStreams
from tests.support.packs import make_batch
from tests.support.tiny_models import build_tiny

LENGTHS = (40, 1, 25, 30)
BIG = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def adapted(*, quantization=None, dtype=torch.float32, has_copies=True):
    if quantization is None:
        model = build_tiny("llama", **BIG).to(dtype)
    else:
        config = build_tiny("llama", **BIG).config.to_dict()
        model = build_model(
            ModelSource(config, init="random"),
            device=torch.device("cpu"),
            dtype=dtype,
            quantization=quantization,
            seed=0,
        )
    model = get_peft_model(
        model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False), autocast_adapter_dtype=True
    )
    if has_copies:
        install_low_precision_adapters(model, ModelPatcher(), compute_dtype=dtype)
    return model.train()


class CountProducts:
    """Count the products of each linear layer by its name in the decoder layer."""

    def __init__(self, monkeypatch):
        self.counts = {}
        linear = nn.functional.linear

        def counted(x, weight, bias=None):
            key = tuple(weight.shape)
            self.counts[key] = self.counts.get(key, 0) + 1
            return linear(x, weight, bias)

        monkeypatch.setattr(nn.functional, "linear", counted)


@pytest.mark.parametrize("kind", ["full", "lora", "lora without copies", "nf4"])
def test_points_are_the_dear_products_and_every_plan_is_exact(kind):
    batches = [make_batch(LENGTHS, seed=seed) for seed in range(2)]
    if kind == "full":
        model = build_tiny("llama", **BIG).train()
    else:
        model = adapted(
            quantization="nf4" if kind == "nf4" else None,
            dtype=torch.bfloat16,
            has_copies=kind != "lora without copies",
        )
    expected = kept_gradients(model, batches, 2)
    planned = PlannedModel(model, batches, make_copy_streams=lambda device: LateStreams(seed=1))
    # The last product is needed by nobody in a second run where what it saves ends that run.
    wanted = LINEARS[:-1] if kind != "lora without copies" else LINEARS
    assert planned.value_names[0] == [name if kind == "full" else f"{name}.base_layer" for name in wanted]
    for seed in range(10):
        planned.follow(random_plan(planned.value_names, seed=seed))
        assert_equal(planned.gradients(2), expected, what=f"{kind}, plan {seed}")


@pytest.mark.parametrize("is_adapted", [False, True])
def test_projections_that_attention_clips_in_place_are_no_points(is_adapted):
    """OLMo's layers write to the outputs of their projections."""
    model = build_tiny("olmoe", clip_qkv=0.3).train()
    if is_adapted:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    batch = make_batch(LENGTHS)
    expected = kept_gradients(model, [batch], 1)
    planned = PlannedModel(model, [batch])
    assert not any("proj" in name for name in planned.value_names[0])
    for seed in range(4):
        planned.follow(random_plan(planned.value_names, seed=seed))
        assert_equal(planned.gradients(1), expected, what=f"plan {seed}")


def test_what_is_held_is_not_computed_again(monkeypatch):
    model, batch = (
        build_tiny("llama", **{**BIG, "num_hidden_layers": 1, "intermediate_size": 96}).train(),
        make_batch(LENGTHS),
    )
    planned = PlannedModel(model, [batch])
    count = CountProducts(monkeypatch)
    shapes = {"gate and up": (96, 64), "down": (64, 96)}

    def products():
        count.counts.clear()
        planned.gradients(1)
        return {name: count.counts[shape] for name, shape in shapes.items()}

    planned.follow([RECOMPUTE])
    assert products() == {"gate and up": 4, "down": 1}
    planned.follow([RECOMPUTE._replace(values=(("mlp.gate_proj", "device"),))])
    assert products() == {"gate and up": 3, "down": 1}
    planned.follow([RECOMPUTE._replace(values=(("mlp.gate_proj", "host"), ("mlp.up_proj", "device")))])
    assert products() == {"gate and up": 2, "down": 1}


def test_packed_weights_that_were_gathered_again_are_read_in_the_backward():
    """FSDP2 gathers a weight for the backward without its quantisation state, and the second run skips its layer."""
    model, batch = adapted(quantization="nf4", dtype=torch.bfloat16), make_batch(LENGTHS)
    expected = kept_gradients(model, [batch], 1)
    install_packed_training(model, ModelPatcher(), checkpointing=OffloadCheckpointing("recompute"))
    model(**batch).loss.backward()
    model.zero_grad()
    loss = model(**batch).loss
    for module in model.modules():
        if hasattr(module, "quant_state"):
            module.weight.quant_state = None
    loss.backward()
    assert_equal(read_gradients(model), expected, what="after a gather")


@pytest.mark.parametrize(("is_adapted", "guess"), [(False, "mlp.gate_proj"), (True, "mlp.up_proj")])
def test_a_last_product_that_is_needed_after_all_is_computed(is_adapted, guess):
    """The second run learns where it ends; should a later forward go on beyond that point, nothing of it is made up."""
    model = adapted(dtype=torch.bfloat16) if is_adapted else build_tiny("llama", **BIG).train()
    batch = make_batch(LENGTHS)
    expected = kept_gradients(model, [batch], 1)
    checkpointing = OffloadCheckpointing("recompute")
    install_packed_training(model, ModelPatcher(), checkpointing=checkpointing)
    for segment in checkpointing.last_segments():
        segment.last_point = guess
    model(**batch).loss.backward()
    assert_equal(read_gradients(model), expected, what="after a wrong guess")
    assert {segment.last_point for segment in checkpointing.last_segments()} == {"mlp.down_proj"}


@pytest.mark.parametrize("is_adapted", [False, True])
def test_a_layer_called_twice_takes_what_was_held_for_each_call(is_adapted):
    """Also where the first call was left out by a wrong guess."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            return torch.tanh(self.inner(torch.tanh(self.inner(x))))

    model = nn.ModuleList([Twice()])
    if is_adapted:
        model = get_peft_model(model.bfloat16(), LoraConfig(r=2, target_modules=["inner"], init_lora_weights=False))
        install_low_precision_adapters(model, ModelPatcher(), compute_dtype=torch.bfloat16)
    layer = next(module for module in model.modules() if isinstance(module, Twice))
    x = torch.randn(6, 8, dtype=torch.bfloat16 if is_adapted else torch.float32, requires_grad=True)
    expected = torch.autograd.grad(layer(x).square().sum(), x)[0]
    segment = Segment(0)
    install_value_points(model, [layer], [segment], ModelPatcher())
    held = "inner.base_layer" if is_adapted else "inner"
    segment.follow(RECOMPUTE._replace(values=((held, "device"),)), None)
    segment.last_point = "inner"
    out = segment.run(layer, x)
    assert torch.equal(torch.autograd.grad(out.square().sum(), x)[0], expected)


def test_names_state_and_classes_come_back():
    model = adapted(dtype=torch.bfloat16)
    before = {name: type(module) for name, module in model.named_modules()}
    keys = list(model.state_dict())
    layers = list(model.base_model.model.model.layers)
    patcher = ModelPatcher()
    count = install_value_points(model, layers, [Segment(index) for index in range(len(layers))], patcher)
    # Seven linear layers and the attention of each decoder layer; the thin products of adapters stay PEFT's own.
    assert count == len(layers) * 8
    assert list(model.state_dict()) == keys
    assert {type(module) for name, module in model.named_modules() if name.endswith("base_layer")} == {HeldLinear}
    assert all(type(module) is nn.Linear for name, module in model.named_modules() if ".lora_A." in name)
    patcher.undo()
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_hooks_and_subclasses_of_a_linear_layer_keep_working():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Named(nn.Linear):
        """A subclass that computes as its parent."""

    model = nn.ModuleList([nn.Sequential(Scaled(4, 4), Named(4, 4), nn.Linear(4, 4))])
    seen = []
    model[0][2].register_forward_hook(lambda *_: seen.append(True))
    plain = copy.deepcopy(model)
    plain[0][2]._forward_hooks.clear()
    assert install_value_points(model, list(model), [Segment(0)], ModelPatcher()) == 2
    x = torch.randn(5, 4)
    assert torch.equal(model[0](x), plain[0](x))
    assert len(seen) == 1
    assert type(model[0][0]) is Scaled


@pytest.mark.covering
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 6), (1, 5, 6), (2, 5, 6)])
@pytest.mark.parametrize("trained", [True, False])
def test_a_held_linear_layer_has_the_bits_of_torchs_own(has_bias, shape, trained):
    torch.manual_seed(0)
    layer = nn.Linear(6, 7, bias=has_bias).requires_grad_(trained)
    wrapped = nn.ModuleList([nn.Sequential(copy.deepcopy(layer))])
    segment = Segment(0)
    install_value_points(wrapped, list(wrapped), [segment], ModelPatcher())
    x, d_out = torch.randn(shape), torch.randn(*shape[:-1], 7)
    found = []
    for run in (layer, lambda x: segment.run(wrapped[0], x)):
        leaf = x.clone().requires_grad_()
        out = run(leaf)
        out.backward(d_out)
        found.append([out.detach(), leaf.grad])
    found[0] += [parameter.grad for parameter in layer.parameters()]
    found[1] += [parameter.grad for parameter in wrapped.parameters()]
    assert all((a is b is None) or torch.equal(a, b) for a, b in zip(*found))
