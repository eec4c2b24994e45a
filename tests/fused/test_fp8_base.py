"""Base products in fp8, emulated on the CPU: near the layers' own where fp8 can be, exact where it must be, and
nothing left behind.
"""

import copy
import pickle
from collections import Counter

import bitsandbytes
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from torch import nn

from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.fused import fp8_base, fp8_weights, linears
from lightning_fastft.fused.fp8_base import FP8_ATTRIBUTE
from lightning_fastft.fused.install import install_fp8_base
from lightning_fastft.fused.linear_parts import read_part
from lightning_fastft.fused.low_precision_adapters import install_low_precision_adapters
from lightning_fastft.kernels.fp8_linear.reference import Fp8Rows, quantise_rows
from lightning_fastft.patches.packed import install_packed_training
from tests.fused.test_decoder import logits_of, quantised, with_dense_weights
from tests.support.layer_pairs import add_lora, build, fuse, is_served, layers_of, step
from tests.support.packs import make_batch, relative_error

WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
FAMILIES = ("qwen3", "gemma3", "phi3", "gpt_oss")
BATCH = (30, 1, 25)


def make(family="qwen3", trained="lora", **options):
    """A model whose layers are not chaotic, so that the error of fp8 stays that of its products."""
    model = build(family, trained, **{**WIDE, **options})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "lora" not in name and "embed" not in name:
                parameter.mul_(0.5)
    return model


def in_fp8(model, *, is_emulated=True, has_copies=False):
    """Install packed training, fused layers and fp8; return the patcher and what says what is active."""
    install_packed_training(model, ModelPatcher())
    if has_copies:
        install_low_precision_adapters(model, ModelPatcher(), compute_dtype=torch.bfloat16)
    patcher = fuse(model)
    (base,) = install_fp8_base(model, patcher, is_emulated=is_emulated)
    return patcher, base


def weight_rows(weight):
    """A weight in e4m3, as products hold it."""
    return quantise_rows(weight, factor_I=None, round_scales_to_power_of_2=True)


def rounded(rows, *, is_weight=False):
    """The numbers that rows or a weight stand for in e4m3."""
    found = quantise_rows(rows, factor_I=None, round_scales_to_power_of_2=is_weight)
    return (found.values_TI.double() * found.scale_T.double()[:, None]).to(rows.dtype)


def weights_of(model):
    return [weight for layer in layers_of(model) for weight in vars(layer)[FP8_ATTRIBUTE]]


# The numbers.


@pytest.mark.parametrize("trained", ["lora", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_as_near_as_fp8_is(family, trained):
    model = make(family, trained)
    plain = copy.deepcopy(model)
    _, base = in_fp8(model)
    install_packed_training(plain, ModelPatcher())
    fuse(plain)
    is_fused, found = is_served(model, lambda: step(model, make_batch(BATCH)))
    expected = step(plain, make_batch(BATCH))
    assert is_fused
    assert found.keys() == expected.keys()
    assert all(found[name].dtype is value.dtype for name, value in expected.items())
    assert base.status().state == "active"
    assert 0 < relative_error(found["loss"], expected["loss"]) < 0.01
    cosines = [
        torch.cosine_similarity(found[name].flatten(), value.flatten(), dim=0).item()
        for name, value in expected.items()
        if value.ndim
    ]
    assert min(cosines) > 0.9
    assert sorted(cosines)[len(cosines) // 2] > 0.98
    assert max(cosines) < 0.99999


@pytest.mark.parametrize("trained", ["lora", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_with_rows_left_as_they_are_it_is_the_layer_of_the_rounded_weights(family, trained, monkeypatch):
    """Everything but the rounding of rows: weights, both layouts, scales, order of columns, adapters, biases and
    residuals, to the last digits.
    """
    model = make(family, trained)
    plain = copy.deepcopy(model)
    with torch.no_grad():
        for layer in layers_of(plain):
            for name, module in layer.named_modules():
                if isinstance(module, nn.Linear) and "lora" not in name and "router" not in name:
                    module.weight.copy_(rounded(module.weight, is_weight=True))
    real = fp8_weights.quantise_rows

    def wide_rows(x_TI, *, factor_I=None, **options):
        if isinstance(x_TI, nn.Parameter):
            return real(x_TI, factor_I=factor_I, **options)
        return Fp8Rows(x_TI if factor_I is None else x_TI * factor_I, torch.ones(len(x_TI)))

    monkeypatch.setattr(fp8_weights, "quantise_rows", wide_rows)
    monkeypatch.setattr(fp8_weights.Fp8Weight, "quantises", lambda *_: False)
    monkeypatch.setattr(
        fp8_weights,
        "multiply",
        lambda rows, weight, scale, **options: (rows.values_TI @ weight.float().T) * (1.0 if scale is None else scale),
    )
    monkeypatch.setattr(
        fp8_weights,
        "weight_gradient",
        lambda d, x, scale_O, **options: (d.values_TI / scale_O).T @ x.values_TI,
    )
    in_fp8(model)
    install_packed_training(plain, ModelPatcher())
    fuse(plain)
    found, expected = step(model, make_batch(BATCH)), step(plain, make_batch(BATCH))
    assert found.keys() == expected.keys()
    assert max(relative_error(found[name], value) for name, value in expected.items()) <= 2e-5


def test_products_are_those_of_rounded_rows_and_weights():
    """One product each way against the numbers that rows and weights stand for."""
    model = make()
    in_fp8(model)
    step(model, make_batch(BATCH))
    (weight, *_), layer = weights_of(model), layers_of(model)[0]
    parts = [
        read_part(module, dtype=torch.float32)
        for module in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
    ]
    dense_OI = torch.cat([part.weight for part in parts])
    x_TI, d_TO = torch.randn(7, 64), torch.randn(7, len(dense_OI))
    scale_O = weight_rows(dense_OI).scale_T
    expected = rounded(x_TI).double() @ rounded(dense_OI, is_weight=True).double().T
    assert relative_error(weight.forward_product(parts, x_TI), expected) <= 1e-6
    expected = (rounded(d_TO * scale_O) / scale_O).double() @ rounded(dense_OI, is_weight=True).double()
    d = weight.quantise_gradient(parts, d_TO)
    assert relative_error(weight.backward_product(parts, d, dtype=d_TO.dtype), expected) <= 1e-6


def test_the_gradient_of_a_trained_weight_is_that_of_the_rows_that_the_other_products_read():
    model = make(trained="full")
    in_fp8(model)
    step(model, make_batch(BATCH))
    weight, layer = weights_of(model)[2], layers_of(model)[0]
    parts = [read_part(module, dtype=torch.float32) for module in (layer.mlp.gate_proj, layer.mlp.up_proj)]
    dense_OI = torch.cat([part.weight for part in parts])
    x_TI, d_TO = torch.randn(7, 64), torch.randn(7, len(dense_OI))
    scale_O = weight_rows(dense_OI).scale_T
    x, d = rounded(x_TI, is_weight=True), rounded(d_TO * scale_O, is_weight=True) / scale_O
    gradient = weight.quantise_gradient(parts, d_TO)
    dense = rounded(dense_OI, is_weight=True)
    assert relative_error(weight.forward_product(parts, x_TI), x.double() @ dense.double().T) <= 1e-6
    assert relative_error(weight.backward_product(parts, gradient, dtype=x.dtype), d.double() @ dense.double()) <= 1e-6
    assert relative_error(weight.weight_gradient(parts, gradient, x_TI), d.double().T @ x.double()) <= 1e-6


@pytest.mark.parametrize("family", [*FAMILIES, "gemma2", "qwen2"])
def test_kernels_that_quantise_what_they_compute_change_no_bit(family, monkeypatch):
    model = make(family, "full")
    in_fp8(model)
    calls = []
    for reader, name in (
        (linears, "rms_norm_quantised"),
        (linears, "gate_forward_quantised"),
        (fp8_weights, "gate_backward_quantised"),
    ):
        real = getattr(reader, name)
        monkeypatch.setattr(
            reader,
            name,
            lambda *args, name=name, real=real, **options: calls.append(name) or real(*args, **options),
        )
    found = step(model, make_batch(BATCH))
    num_calls = dict(Counter(calls))
    monkeypatch.setattr(fp8_weights.Fp8Weight, "quantises", lambda *_: False)
    apart = step(model, make_batch(BATCH))
    assert len(calls) == sum(num_calls.values())
    assert all(torch.equal(found[name], value) for name, value in apart.items())
    # Norms before qkv and before the block, forward and backward; gpt-oss has a block of experts.
    blocks = {} if family == "gpt_oss" else {"gate_forward_quantised": 2, "gate_backward_quantised": 2}
    assert num_calls == {"rms_norm_quantised": 4 if family == "gpt_oss" else 8, **blocks}


@pytest.mark.parametrize("num_batches", [1, 3])
def test_gradients_of_several_batches_add_up(num_batches):
    model = make(trained="full")
    in_fp8(model)
    batches = [make_batch(BATCH, seed=seed) for seed in range(num_batches)]
    pieces = [step(model, batch) for batch in batches]
    for batch in batches:
        model(**batch).loss.backward()
    for name, parameter in model.named_parameters():
        total = pieces[0][name]
        for piece in pieces[1:]:
            total = total + piece[name]
        assert torch.equal(parameter.grad, total), name


class _Unseen(torch.optim.SGD):
    """Writes weights as bitsandbytes does: no version counter shows it."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-group["lr"])


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, _Unseen])
def test_weights_are_quantised_once_per_step_after_it(optimizer, monkeypatch):
    model = make(trained="full")
    twin = copy.deepcopy(model)
    _, base = in_fp8(model)
    given, real = [], fp8_weights.quantise_rows
    monkeypatch.setattr(
        fp8_weights,
        "quantise_rows",
        lambda x, **options: given.append(isinstance(x, nn.Parameter)) or real(x, **options),
    )
    steps = optimizer(model.parameters(), lr=0.05)
    for number in range(3):
        for seed in range(2):
            model(**make_batch(BATCH, seed=10 * number + seed)).loss.backward()
        steps.step()
        base.refresh()
        model.zero_grad()
        assert sum(given) == 14 * (number + 2)
    twin.load_state_dict(model.state_dict())
    in_fp8(twin)
    found, expected = step(model, make_batch(BATCH)), step(twin, make_batch(BATCH))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_trained_weights_hold_one_byte_each_and_share_the_memory_of_the_transpose():
    model = make(trained="full")
    _, base = in_fp8(model)
    step(model, make_batch(BATCH))
    places = [tensor.data_ptr() for weight in weights_of(model) for tensor in weight.memory()]
    narrow = [tensor for weight in weights_of(model) for tensor in weight.memory() if tensor.itemsize == 1]
    num_weights = sum(
        module.weight.numel()
        for layer in layers_of(model)
        for module in layer.modules()
        if isinstance(module, nn.Linear)
    )
    assert sum(tensor.numel() for tensor in narrow) == num_weights
    (buffer,) = base.memory()
    assert buffer.numel() == 2 * 128 * 64
    base.refresh()
    assert [tensor.data_ptr() for weight in weights_of(model) for tensor in weight.memory()] == places


@pytest.mark.parametrize("adapter_dtype", [torch.bfloat16, torch.float32])
def test_nf4_goes_to_fp8_without_a_copy(adapter_dtype):
    model = quantised(adapter_dtype=adapter_dtype)
    plain = copy.deepcopy(model)
    dense = with_dense_weights(model).float()
    has_copies = adapter_dtype is torch.float32
    _, base = in_fp8(model, has_copies=has_copies)
    for each in (plain, dense):
        install_packed_training(each, ModelPatcher())
    if has_copies:
        install_low_precision_adapters(plain, ModelPatcher(), compute_dtype=torch.bfloat16)
    fuse(plain)
    with torch.inference_mode():
        model(**make_batch(BATCH))
    is_fused, found = is_served(model, lambda: step(model, make_batch(BATCH)))
    assert is_fused
    own, truth = step(plain, make_batch(BATCH)), step(dense, make_batch(BATCH))
    cosines = [
        torch.cosine_similarity(found[name].float().flatten(), value.flatten(), dim=0).item()
        for name, value in truth.items()
        if value.ndim
    ]
    assert min(cosines) > 0.98
    assert max(relative_error(own[name], value) for name, value in truth.items()) < max(
        relative_error(found[name], value) for name, value in truth.items()
    )
    # One buffer of the largest product, a byte a weight, and no copies of weights; nothing is dense in bf16.
    (buffer,) = base.memory()
    assert (buffer.dtype, buffer.numel()) == (torch.float8_e4m3fn, 2 * 128 * 64)
    assert all(
        [each.dtype for each in weight.memory()] == [torch.float32, torch.bfloat16] for weight in weights_of(model)
    )
    assert all(vars(layer)["fastft_fusion"].dense.memory() == [] for layer in layers_of(model))


def test_two_runs_are_bit_equal_and_dense_weights_are_quantised_once(monkeypatch):
    model = make()
    in_fp8(model)
    given, real = [], fp8_weights.quantise_rows
    monkeypatch.setattr(
        fp8_weights,
        "quantise_rows",
        lambda x, **options: given.append(isinstance(x, nn.Parameter)) or real(x, **options),
    )
    first = step(model, make_batch(BATCH))
    assert sum(given) == 14
    assert all(torch.equal(value, first[name]) for name, value in step(model, make_batch(BATCH)).items())
    assert sum(given) == 14
    num_bytes = sum(
        tensor.numel() for weight in weights_of(model) for tensor in weight.memory() if tensor.itemsize == 1
    )
    num_weights = sum(
        parameter.numel()
        for layer in layers_of(model)
        for name, parameter in layer.named_parameters()
        if "base_layer.weight" in name
    )
    # What the first layer reads is not trained, so its first products have no backward by it.
    first = layers_of(model)[0].self_attn
    num_forward_only = sum(module.base_layer.weight.numel() for module in (first.q_proj, first.k_proj, first.v_proj))
    assert num_bytes == 2 * num_weights - num_forward_only


def test_a_validation_before_the_first_step_holds_one_layout_and_changes_nothing():
    model = make()
    twin = copy.deepcopy(model)
    in_fp8(model)
    in_fp8(twin)
    with torch.inference_mode():
        model(**make_batch(BATCH))
    assert all(len(weight.memory()) == 3 for weight in weights_of(model))
    # Other weights, for all that can be seen: written again into the memory that the validation made.
    model.load_state_dict(twin.state_dict())
    found, expected = step(model, make_batch(BATCH)), step(twin, make_batch(BATCH))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_weights_that_are_loaded_anew_are_quantised_anew_in_their_place():
    model, other = make(), make(attention_bias=False)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    in_fp8(model)
    in_fp8(other)
    step(model, make_batch(BATCH))
    places = [tensor.data_ptr() for weight in weights_of(model) for tensor in weight.memory()]
    model.load_state_dict(other.state_dict())
    found, expected = step(model, make_batch(BATCH)), step(other, make_batch(BATCH))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert [tensor.data_ptr() for weight in weights_of(model) for tensor in weight.memory()] == places


def test_scales_of_nf4_weights_that_are_written_anew_are_found_anew():
    model = quantised(adapter_dtype=torch.bfloat16)
    other = copy.deepcopy(model)
    for module in other.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            write_larger_rows(module.weight)
    in_fp8(model)
    in_fp8(other)
    step(model, make_batch(BATCH))
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            write_larger_rows(module.weight)
    found, expected = step(model, make_batch(BATCH)), step(other, make_batch(BATCH))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def write_larger_rows(weight):
    """Write an NF4 weight in its place whose rows are 1, 2, 4, ... times what they were, so that other scales fit."""
    state = weight.quant_state
    dense_OI = dequantize_4bit(weight.data, state)
    factor_O = 2.0 ** (torch.arange(len(dense_OI)) % 4)
    packed, weight.quant_state = quantize_4bit(
        dense_OI * factor_O[:, None].to(dense_OI.dtype), quant_type="nf4", compress_statistics=state.nested
    )
    with torch.no_grad():
        weight.copy_(packed)


# Who computes.


def test_a_trained_layer_beside_frozen_ones_leaves_its_product_alone():
    model = make()
    layers_of(model)[1].mlp.up_proj.base_layer.weight.requires_grad_(True)
    _, base = in_fp8(model)
    step(model, make_batch(BATCH))
    reason = "trained and frozen layers read the same rows"
    assert base.status().reason == f"7 products of 2 layers in e4m3, in plain PyTorch, 1 not: {reason}"


def test_merged_adapters_compute_in_the_dtype_of_the_model_and_come_back():
    model = make()
    plain = copy.deepcopy(model)
    in_fp8(model)
    install_packed_training(plain, ModelPatcher())
    fuse(plain)
    before = logits_of(model)
    assert relative_error(before, logits_of(plain)) > 1e-4
    for each in (model, plain):
        each.merge_adapter()
    assert torch.equal(logits_of(model), logits_of(plain))
    model.unmerge_adapter()
    assert relative_error(logits_of(model), before) < 1e-5
    # Weights that adapters were merged into for good are other weights.
    merged, expected = model.merge_and_unload(), plain.merge_and_unload()
    logits_of(merged)
    weights = [weight for weight in weights_of(merged) if weight.memory()]
    assert torch.equal(
        weights[1].memory()[2].float(), weight_rows(layers_of(expected)[0].self_attn.o_proj.weight).values_TI.float()
    )


def test_a_disabled_adapter_leaves_the_base_in_fp8():
    model = make()
    in_fp8(model)
    before = logits_of(model)
    with model.disable_adapter():
        assert relative_error(logits_of(model), before) > 1e-2
    assert torch.equal(logits_of(model), before)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"is_emulated": False},
            "fp8 products need a CUDA device of compute capability 8.9 or higher, and the weights are on cpu",
        ),
        ({"intermediate_size": 72}, "fp8 products need multiples of 16 columns, and a weight is 72 x 64"),
        ({"dtype": torch.float64}, "rows are in torch.float64"),
        ({"is_sharded": True}, "the weights are sharded (FSDP2)"),
    ],
)
def test_what_cannot_compute_in_fp8_runs_as_ever_and_the_table_says_why(change, reason, monkeypatch):
    options = dict(change)
    is_emulated = options.pop("is_emulated", True)
    if options.pop("is_sharded", False):
        for module in (fp8_base, fp8_weights):
            monkeypatch.setattr(module, "FSDPModule", nn.Module)
    model = build("qwen3", "lora", **{**WIDE, **options})
    plain = copy.deepcopy(model)
    _, base = in_fp8(model, is_emulated=is_emulated)
    install_packed_training(plain, ModelPatcher())
    fuse(plain)
    found, expected = step(model, make_batch(BATCH)), step(plain, make_batch(BATCH))
    status = base.status()
    if "intermediate_size" in change:
        assert (status.state, status.reason.partition(", 4 not: ")[0]) == (
            "active",
            "4 products of 2 layers in e4m3, in plain PyTorch",
        )
        assert status.reason.endswith((reason, reason.replace("72 x 64", "64 x 72")))
        return
    assert status == ("fp8 products", "inactive", f"{reason}; products run in the dtype of the model", "")
    assert all(torch.equal(found[name], value) for name, value in expected.items())


# What stays.


@pytest.mark.parametrize("trained", ["lora", "full"])
def test_undo_leaves_nothing_and_names_stay(trained):
    model = make(trained=trained)
    install_packed_training(model, ModelPatcher())
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    state, logits = model.state_dict(), logits_of(model)
    patcher = fuse(model)
    (base,) = install_fp8_base(model, patcher, is_emulated=True)
    weights = weights_of(model)
    step(model, make_batch(BATCH))
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    was = base.status()
    patcher.undo()
    assert base.status() == was
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert base.memory() == []
    assert all(weight.memory() == [] for weight in weights)
    assert torch.equal(logits_of(model), logits)


@pytest.mark.parametrize("trained", ["lora", "full"])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copied_or_pickled_model_stands_alone(duplicate, trained):
    model = make(trained=trained)
    in_fp8(model)
    expected = step(model, make_batch(BATCH))
    twin = duplicate(model)
    assert all(weight.memory() == [] for weight in weights_of(twin))
    found = step(twin, make_batch(BATCH))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert not {tensor.data_ptr() for weight in weights_of(twin) for tensor in weight.memory()} & {
        tensor.data_ptr() for weight in weights_of(model) for tensor in weight.memory()
    }


def test_saved_adapters_are_pefts(tmp_path):
    model = make()
    plain = copy.deepcopy(model)
    in_fp8(model)
    step(model, make_batch(BATCH))
    for name, each in (("ours", model), ("plain", plain)):
        each.save_pretrained(tmp_path / name)
    ours, theirs = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("ours", "plain"))
    assert ours == theirs


def test_adapters_in_fp32_get_fp32_gradients():
    model = add_lora(build("llama", "full", **WIDE).bfloat16(), adapter_dtype=torch.float32).train()
    in_fp8(model, has_copies=True)
    found = step(model, make_batch(BATCH))
    assert {value.dtype for name, value in found.items() if name != "loss"} == {torch.float32}


def test_after_a_run_the_table_says_what_computed_in_it():
    model = make()
    patcher, base = in_fp8(model)
    step(model, make_batch(BATCH))
    # As when a strategy has moved the model to the host before callbacks are torn down.
    base.is_emulated = False
    patcher.undo()
    assert base.status().state == "active"
