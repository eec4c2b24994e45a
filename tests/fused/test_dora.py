"""DoRA in fused layers and in single layers: the numbers of PEFT's own forward, over several optimizer steps."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from peft import get_peft_model_state_dict
from peft.tuners.lora.layer import LoraLayer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.fused import column_scales, row_factors
from lightning_fastft.fused.install import fuse_weight_buffers, install_fp8_base, install_fused_layers
from lightning_fastft.fused.layer_parts import fp8_shapes
from lightning_fastft.fused.low_precision_adapters import install_low_precision_adapters
from lightning_fastft.fused.row_factors import FACTORS_ATTRIBUTE
from lightning_fastft.kernels.column_scale.op import row_factors as compute_factors
from lightning_fastft.patches.packed import install_packed_training
from tests.support.layer_pairs import add_lora, build, is_served, layers_of, step
from tests.support.packs import make_batch, relative_error

pytestmark = pytest.mark.covering
NUM_STEPS = 3


def make_model(family="llama", **options):
    """A model whose magnitudes are no row norms."""
    torch.manual_seed(0)
    model = add_lora(build(family, "full"), use_dora=True, **options).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                parameter.mul_(torch.rand_like(parameter) + 0.5)
    return model


def own_forward(model, policy="keep"):
    """The twin that runs PEFT's forward."""
    plain = copy.deepcopy(model)
    install_packed_training(plain, ModelPatcher(), checkpointing=OffloadCheckpointing(policy))
    return plain


def fused(model, patcher, *, policy="keep", has_owner=True):
    """The model as a run makes it."""
    (status,) = install_fused_layers(model, patcher, awaits_copies=True)
    assert status.state == "active", status
    owner = install_low_precision_adapters(model, patcher, compute_dtype=torch.float32) if has_owner else None
    install_packed_training(model, patcher, checkpointing=OffloadCheckpointing(policy))
    return owner


def unseen_step(model, gradients, owner):
    """An optimizer step that changes no version counter, as fused optimizers do."""
    for name, parameter in model.named_parameters():
        if name in gradients:
            parameter.data.add_(gradients[name], alpha=-0.3 / float(gradients[name].norm()))
    if owner is not None:
        owner.refresh(is_after_step=True)


def assert_same_steps(ours, plain, owner, *, bound=1e-5, num_steps=NUM_STEPS):
    """Losses and all gradients are PEFT's in each of several optimizer steps, which move them."""
    losses = []
    for number in range(num_steps):
        batch = make_batch(seed=number % 2)
        found, expected = step(ours, batch), step(plain, batch)
        assert found.keys() == expected.keys()
        kinds = {name.split(".lora_")[-1].split(".")[0] for name in found}
        assert {"A", "B", "magnitude_vector"} <= kinds
        errors = {name: relative_error(found[name], value) for name, value in expected.items()}
        assert max(errors.values()) <= bound, max(errors.items(), key=lambda item: item[1])
        losses.append(float(expected["loss"]))
        unseen_step(ours, found, owner)
        unseen_step(plain, found, None)
    assert abs(losses[-1] / losses[0] - 1) > 1e-3


@pytest.mark.parametrize("policy", ["keep", "recompute"])
@pytest.mark.parametrize("family", ["llama biased", "qwen3", "gemma3", "granite"])
def test_steps_are_pefts(family, policy):
    model = make_model(family)
    plain, patcher = own_forward(model, policy), ModelPatcher()
    owner = fused(model, patcher, policy=policy)
    fuse_weight_buffers(model, patcher, device_types=("cpu",))
    assert is_served(model, lambda: step(model, make_batch()))[0]
    assert_same_steps(model, plain, owner)
    patcher.undo()
    assert not any(FACTORS_ATTRIBUTE in vars(module) for module in model.modules())


@pytest.mark.parametrize("targets", [["q_proj"], ["v_proj", "up_proj", "down_proj"]])
def test_layers_without_dora_beside_it_are_not_scaled(targets):
    model = make_model("llama biased", target_modules=targets)
    plain, patcher = own_forward(model), ModelPatcher()
    owner = fused(model, patcher)
    assert is_served(model, lambda: step(model, make_batch()))[0]
    assert_same_steps(model, plain, owner)


def test_without_an_owner_norms_are_computed_for_each_call():
    model = make_model()
    plain = own_forward(model)
    fused(model, ModelPatcher(), has_owner=False)
    assert_same_steps(model, plain, None)


def test_norms_are_computed_once_per_step(monkeypatch):
    calls = []

    def counted(*args, real=compute_factors, **options):
        calls.append(1)
        return real(*args, **options)

    monkeypatch.setattr(row_factors, "row_factors", counted)
    model, patcher = make_model(), ModelPatcher()
    owner = fused(model, patcher, policy="recompute")
    num_layers = 7 * len(layers_of(model))
    # The check before the swap has no owner yet.
    calls.clear()
    found = step(model, make_batch())
    step(model, make_batch())
    with torch.no_grad():
        model(**make_batch())
    assert len(calls) == num_layers
    addresses = [vars(module)[FACTORS_ATTRIBUTE].tensor.data_ptr() for module in magnitudes(model)]
    unseen_step(model, found, owner)
    step(model, make_batch())
    assert len(calls) == 2 * num_layers
    # Recorded graphs read them where they were.
    assert addresses == [vars(module)[FACTORS_ATTRIBUTE].tensor.data_ptr() for module in magnitudes(model)]


def magnitudes(model):
    return [module for module in model.modules() if type(module).__name__ == "DoraLinearLayer"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(24, 20), nn.Linear(20, 24, bias=False)

    def forward(self, x, **kwargs):
        return self.second(torch.tanh(self.first(x)))


def test_single_layers_give_pefts_numbers():
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["first", "second"], init_lora_weights=False, use_dora=True)
    model = get_peft_model(Net(), config).train()
    plain = copy.deepcopy(model)
    owner = install_low_precision_adapters(model, ModelPatcher(), compute_dtype=torch.float32)
    assert "2 DoRA layers" in owner.status.reason
    for number in range(NUM_STEPS):
        x = torch.randn(2, 9, 24, generator=torch.Generator().manual_seed(number)).requires_grad_()
        found = []
        for each in (model, plain):
            each.zero_grad(set_to_none=True)
            out = each(x)
            trained = {name: value for name, value in each.named_parameters() if value.requires_grad}
            gradients = torch.autograd.grad(out.square().sum(), [x, *trained.values()])
            found.append({"out": out.detach(), **dict(zip(["x", *trained], gradients))})
        assert max(relative_error(found[0][name], value) for name, value in found[1].items()) <= 1e-5
        unseen_step(model, found[0], owner)
        unseen_step(plain, found[0], None)


FAULTS = {
    "norms of the first step": (row_factors.RowFactors, "update", None),
    "no scale in the gradient": (column_scales, "scale_columns_backward", "ones"),
    "gradient of the magnitude lost": (column_scales, "magnitude_gradient", "zeros"),
    "adapter not in the norm": (row_factors, "row_factors", "base only"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(fault, monkeypatch):
    owner_of, name, kind = FAULTS[fault]
    real = getattr(owner_of, name)

    def faulty(*args, **options):
        if kind is None:
            # Computed once, then taken for current.
            self = args[0]
            if not self._marks:
                self.is_computed = getattr(self, "is_computed", 0) + 1
            if self.is_computed == 1:
                real(*args, **options)
            self._marks = self._find_marks()
            return None
        if kind == "ones":
            return real(args[0], args[1], torch.ones_like(args[2]), **options)
        if kind == "zeros":
            return torch.zeros_like(real(*args, **options))
        weight_OI, a_RI, b_OR, magnitude_O = args
        return real(weight_OI, a_RI, torch.zeros_like(b_OR), magnitude_O, **options)

    model = make_model()
    plain = own_forward(model)
    monkeypatch.setattr(owner_of, name, faulty)
    owner = fused(model, ModelPatcher())
    with pytest.raises(AssertionError):
        assert_same_steps(model, plain, owner)


def test_a_refresh_between_forward_and_backward_is_an_error():
    model = make_model()
    owner = fused(model, ModelPatcher())
    loss = model(**make_batch()).loss
    owner.refresh()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_merging_switching_and_files_are_pefts():
    model = make_model()
    model.add_adapter("plain", copy.deepcopy(model.peft_config["default"]).__class__(r=2, target_modules=["q_proj"]))
    plain, patcher = own_forward(model), ModelPatcher()
    owner = fused(model, patcher)
    batch = make_batch()
    step(model, batch)

    def same():
        with torch.no_grad():
            assert relative_error(model(**batch).loss, plain(**batch).loss) <= 1e-6

    same()
    for name in ("plain", "default"):
        for each in (model, plain):
            each.set_adapter(name)
        same()
    for each in (model, plain):
        each.merge_adapter()
    same()
    for each in (model, plain):
        each.unmerge_adapter()
        for layer in layers_of(each):
            layer.self_attn.q_proj.base_layer.weight.data.mul_(1.5)
    # A merged weight may come back changed, which no version counter shows.
    same()
    assert get_peft_model_state_dict(model).keys() == get_peft_model_state_dict(plain).keys()
    assert any("lora_magnitude_vector" in name for name in get_peft_model_state_dict(model))
    again = pickle.loads(pickle.dumps(copy.deepcopy(magnitudes(model)[0])))
    assert torch.equal(again.weight, magnitudes(model)[0].weight)
    owner.refresh()
    patcher.undo()


OBSTACLES = {
    "dropout": (lambda: make_model(lora_dropout=0.1), "DoRA with dropout"),
    "trained bias": (lambda: make_model("llama biased", bias="all"), "whose weight or bias is trained"),
}


@pytest.mark.parametrize("case", OBSTACLES)
def test_what_is_not_served_runs_pefts_own_forward_and_says_so(case):
    make, reason = OBSTACLES[case]
    model, patcher = make(), ModelPatcher()
    (status,) = install_fused_layers(model, patcher)
    assert status.state == "refused"
    assert reason in status.reason
    owner = install_low_precision_adapters(model, patcher, compute_dtype=torch.bfloat16)
    assert owner.status.state == "inactive"
    assert "PEFT's own forward for 14 LoRA layers" in owner.status.reason


def test_products_in_fp8_are_scaled_too():
    def error_of(model):
        """How far the gradients of an fp8 base are from those of a bf16 base."""
        plain, patcher = copy.deepcopy(model), ModelPatcher()
        for each in (model, plain):
            install_fused_layers(each, patcher)
            install_packed_training(each, patcher)
        (base,) = install_fp8_base(model, patcher, is_emulated=True)
        found, expected = step(model, make_batch()), step(plain, make_batch())
        assert base.status().state == "active", base.status()
        found, expected = (
            torch.cat([value.float().flatten() for value in each.values()]) for each in (found, expected)
        )
        return relative_error(found, expected)

    def lora(**options):
        torch.manual_seed(0)
        return add_lora(build("llama", "full"), **options).bfloat16().train()

    assert error_of(lora(use_dora=True)) < 1.3 * error_of(lora())
    # Other magnitudes are another function, whose errors are larger; without its scale the error is above 0.5.
    assert error_of(make_model().bfloat16()) < 0.3


def test_weights_below_dora_are_not_gathered_in_e4m3():
    of_lora, of_dora = (
        fp8_shapes(
            layers_of(
                add_lora(
                    build("llama", "full", intermediate_size=64),
                    target_modules=["q_proj", "down_proj"],
                    use_dora=is_dora,
                )
            )[0]
        )
        for is_dora in (False, True)
    )
    assert [len(shapes) for shapes in of_lora] == [3, 1, 2, 1]
    assert of_dora == [of_lora[1], of_lora[2]]


def test_a_released_model_is_freed():
    model = make_model()
    fused(model, ModelPatcher())
    step(model, make_batch())
    reference = weakref.ref(magnitudes(model)[0].weight)
    del model
    gc.collect()
    assert reference() is None


def test_sharded_weights_wait_for_their_gather():
    model = make_model()
    patcher = ModelPatcher()
    fused(model, patcher)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        for module in model.modules():
            if isinstance(module, LoraLayer):
                base = module.get_base_layer()
                base.weight = nn.Parameter(distribute_tensor(base.weight.data, mesh), requires_grad=False)
        # A run calls it once its model is sharded.
        assert fuse_weight_buffers(model, patcher, device_types=("cpu",)) == []
    finally:
        torch.distributed.destroy_process_group()
