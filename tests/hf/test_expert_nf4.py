"""Experts in NF4: bitsandbytes' numbers for each expert, a step bit-equal to the dense one, one dense stack at a
time, and names that stay.
"""

import copy
import io
import pickle
from unittest import mock

import bitsandbytes.functional as bnb
import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_fastft.core.errors import MissingDependencyError, UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.hf.expert_nf4 import BUFFER_ATTRIBUTE, DenseBuffer, quantise_experts, read_nf4
from lightning_fastft.hf.expert_nf4_tensor import ExpertsNF4, quantise_stack
from lightning_fastft.moe.install import install_bincount_router
from tests.support.nf4_stacks import expert_state
from tests.support.tiny_models import VOCABULARY, build_tiny
from tests.support.truth import Watch

pytestmark = pytest.mark.covering

FAMILIES = ("qwen3_moe", "gpt_oss", "mixtral", "olmoe", "deepseek_v3", "llama4_text", "nemotron_h")
TARGETS = ["experts.gate_up_proj", "experts.down_proj"]


def stacks_of(model):
    return {name: parameter for name, parameter in model.named_parameters() if isinstance(parameter, ExpertsNF4)}


def with_dense_weights(model):
    """A copy of a quantised model with plain parameters that hold what the quantised ones stand for."""
    model = copy.deepcopy(model)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, ExpertsNF4):
                module._parameters[name] = nn.Parameter(parameter.dense(), requires_grad=False)
    return model


def add_lora(model, targets=TARGETS):
    torch.manual_seed(3)
    lora = LoraConfig(r=2, target_parameters=targets, target_modules=["q_proj"], init_lora_weights=False)
    return get_peft_model(model, lora)


def step(model):
    ids = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def assert_same_step(ours, theirs):
    (our_loss, our_grads), (their_loss, their_grads) = step(ours), step(theirs)
    assert torch.equal(our_loss, their_loss)
    assert our_grads.keys() == their_grads.keys()
    assert all(torch.equal(our_grads[name], grad) for name, grad in their_grads.items())
    assert all(grad.abs().sum() > 0 for grad in our_grads.values())


class LiveStacks(TorchDispatchMode):
    """The largest number of float tensors of a size at least that are alive together, by their storages."""

    def __init__(self, num_values):
        super().__init__()
        self.num_values, self.peak, self._alive = num_values, 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if (
                type(leaf) in (torch.Tensor, nn.Parameter)
                and leaf.is_floating_point()
                and leaf.numel() >= self.num_values
            ):
                self._alive.setdefault(leaf.untyped_storage()._cdata, StorageWeakRef(leaf.untyped_storage()))
        self._alive = {key: ref for key, ref in self._alive.items() if not ref.expired()}
        self.peak = max(self.peak, len(self._alive))
        return out


# The numbers.


def dense_of(packed, state):
    """What bitsandbytes makes of a weight, asked for block by block.

    On a processor with AVX-512 its 0.50.2 reads other blocks' scales where a row is no multiple of 64 columns, as in
    these small experts.
    """
    by_block = copy.copy(state)
    by_block.shape = torch.Size((packed.numel() * 2 // 64, 64))
    return bnb.dequantize_4bit(packed, by_block).view(state.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_expert_has_the_numbers_of_bitsandbytes(family, dtype):
    model = build_tiny(family).to(dtype)
    plain = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    status = quantise_experts(model)
    stacks = stacks_of(model)
    assert status.state == "active"
    assert status.reason.startswith(f"{len(stacks)} stacks")
    assert {name for name, parameter in plain.items() if parameter.ndim == 3 and "experts" in name} == set(stacks)
    for name, stack in stacks.items():
        assert (stack.shape, stack.dtype, stack.requires_grad) == (plain[name].shape, dtype, False)
        for expert, weight in enumerate(plain[name]):
            packed, state = bnb.quantize_4bit(
                weight.contiguous(), blocksize=64, compress_statistics=True, quant_type="nf4"
            )
            own_packed, own_state = expert_state(stack, expert)
            assert torch.equal(own_packed, packed)
            assert torch.equal(own_state.absmax, state.absmax)
            assert torch.equal(own_state.offset, state.offset)
            assert torch.equal(own_state.state2.absmax, state.state2.absmax)
            truth = dense_of(packed, state)
            assert torch.equal(dense_of(own_packed, own_state), truth)
            assert torch.equal(stack.dense()[expert], truth)
            assert torch.equal(stack[expert], truth)
            assert torch.equal(stack[expert - len(stack)], truth)


def test_one_expert_at_a_time_is_quantised():
    shapes = []
    quantise = bnb.quantize_4bit

    def counted(weight, **options):
        shapes.append(tuple(weight.shape))
        return quantise(weight, **options)

    model = build_tiny("qwen3_moe")
    with mock.patch.object(bnb, "quantize_4bit", counted):
        quantise_experts(model)
    assert set(shapes) == {(48, 32), (32, 24)}
    assert len(shapes) == 16


def test_a_block_is_quantised_on_its_own_and_joined_later():
    model = build_tiny("qwen3_moe")
    first, second = (layer.mlp.experts for layer in model.model.layers)
    assert quantise_experts(model.model.layers[0]).reason.startswith("2 stacks")
    assert isinstance(first.gate_up_proj, ExpertsNF4)
    assert type(second.gate_up_proj) is nn.Parameter
    before = first.gate_up_proj
    quantise_experts(model)
    assert first.gate_up_proj is before
    assert vars(first)[BUFFER_ATTRIBUTE] is vars(second)[BUFFER_ATTRIBUTE]


def test_models_without_experts_stay():
    assert quantise_experts(build_tiny("qwen3")).state == "inactive"


# A step.


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "router"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_step_is_bit_equal_to_the_dense_one(family, experts, is_checkpointed):
    model = build_tiny(family, experts="eager" if experts == "router" else experts)
    quantise_experts(model)
    pair = [add_lora(each).train() for each in (copy.deepcopy(model), with_dense_weights(model))]
    for adapted in pair:
        if is_checkpointed:
            adapted.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            adapted.enable_input_require_grads()
        if experts == "router":
            install_bincount_router(adapted, ModelPatcher())
    assert_same_step(*pair)


def test_llama4_without_adapters_on_its_experts():
    model = build_tiny("llama4_text")
    quantise_experts(model)
    assert_same_step(
        *(add_lora(each, targets=None).train() for each in (copy.deepcopy(model), with_dense_weights(model)))
    )


def test_two_adapters_take_pefts_own_way():
    model = build_tiny("qwen3_moe")
    quantise_experts(model)
    pair = [add_lora(each).train() for each in (copy.deepcopy(model), with_dense_weights(model))]
    for adapted in pair:
        torch.manual_seed(4)
        adapted.add_adapter("second", copy.deepcopy(adapted.peft_config["default"]))
        adapted.base_model.set_adapter(["default", "second"])
        install_bincount_router(adapted, ModelPatcher())
    assert_same_step(*pair)


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_one_dense_stack_at_a_time(family, is_checkpointed):
    options = {"layer_types": ["full_attention"] * 3} if family == "gpt_oss" else {"moe_intermediate_size": 32}
    model = build_tiny(family, num_hidden_layers=3, **options)
    quantise_experts(model)
    model = add_lora(model).train()
    if is_checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    install_bincount_router(model, ModelPatcher())
    step(model)
    smallest = min(stack.numel() for stack in stacks_of(model).values())
    # Whatever else is as large would be counted, too.
    assert all(
        parameter.numel() < smallest for parameter in model.parameters() if not isinstance(parameter, ExpertsNF4)
    )
    with LiveStacks(smallest) as live:
        step(model)
    assert live.peak == 1


def test_pefts_registration_writes_no_stack():
    model = build_tiny("qwen3_moe", experts="eager", moe_intermediate_size=32)
    quantise_experts(model)
    model = add_lora(model)
    with LiveStacks(4096) as live, torch.no_grad():
        model(input_ids=torch.arange(3, 9)[None])
    assert live.peak == 0


def test_loops_over_experts_read_one_expert():
    model = build_tiny("gpt_oss", experts="eager")
    quantise_experts(model)
    seen = []
    dense = ExpertsNF4.dense

    def counted(self, **options):
        seen.append(options.get("expert"))
        return dense(self, **options)

    with mock.patch.object(ExpertsNF4, "dense", counted), torch.no_grad():
        model(input_ids=torch.arange(3, 9)[None])
    assert seen
    assert None not in seen


def test_the_core_gets_a_view_of_one_buffer():
    model = build_tiny("qwen3_moe")
    quantise_experts(model)
    experts = model.model.layers[0].mlp.experts
    gate_up, down = (read_nf4(experts, name, getattr(experts, name)) for name in ("gate_up_proj", "down_proj"))
    assert (gate_up.shape, gate_up.dtype, gate_up.device) == ((4, 32, 48), torch.float32, torch.device("cpu"))
    first = gate_up.dense()
    assert first.shape == gate_up.shape
    assert torch.equal(first, experts.gate_up_proj.dense().transpose(1, 2))
    second = down.dense()
    assert torch.equal(second, experts.down_proj.dense().transpose(1, 2))
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert read_nf4(experts, "other", nn.Parameter(torch.zeros(1))) is None
    with Watch() as watch:
        gate_up.dense()
    assert watch.waits == []


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "router"])
@pytest.mark.parametrize("has_adapters", [False, True])
def test_inference_mode_reads_what_training_reads(experts, has_adapters):
    model = build_tiny("qwen3_moe", experts="eager" if experts == "router" else experts)
    quantise_experts(model)
    model = add_lora(model) if has_adapters else model
    if experts == "router":
        install_bincount_router(model, ModelPatcher())
    ids = torch.arange(3, 12)[None]
    expected = model(input_ids=ids).logits.detach()
    with torch.inference_mode():
        assert torch.equal(model(input_ids=ids).logits, expected)


def test_training_goes_on_after_an_evaluation_that_came_first():
    model = add_lora(quantised())
    install_bincount_router(model, ModelPatcher())
    ids = torch.arange(3, 12)[None]
    # The installation asked first, to see which product serves the stacks.
    for module in model.modules():
        if BUFFER_ATTRIBUTE in vars(module):
            vars(module)[BUFFER_ATTRIBUTE]._memory.clear()
    with torch.inference_mode():
        evaluated = model(input_ids=ids, labels=ids).loss.clone()
    trained = model(input_ids=ids, labels=ids).loss
    trained.backward()
    assert torch.equal(trained.detach(), evaluated)


def test_transposed_stacks_keep_their_order():
    model = build_tiny("gpt_oss")
    quantise_experts(model)
    experts = model.model.layers[0].mlp.experts
    weight = read_nf4(experts, "gate_up_proj", experts.gate_up_proj)
    assert weight.shape == experts.gate_up_proj.shape
    assert torch.equal(weight.dense(), experts.gate_up_proj.dense())


def test_copies_of_the_buffer_are_empty():
    buffer = DenseBuffer()
    taken = buffer.take(torch.Size((2, 3)), dtype=torch.float32, device=torch.device("cpu"))
    assert buffer.take(torch.Size((3,)), dtype=torch.float32, device=torch.device("cpu")).data_ptr() == taken.data_ptr()
    assert buffer.take(torch.Size((7,)), dtype=torch.float32, device=torch.device("cpu")).shape == (7,)
    assert copy.deepcopy(buffer)._memory == pickle.loads(pickle.dumps(buffer))._memory == {}
    model = build_tiny("qwen3_moe")
    quantise_experts(model)
    first, second = (layer.mlp.experts for layer in copy.deepcopy(model).model.layers)
    assert vars(first)[BUFFER_ATTRIBUTE] is vars(second)[BUFFER_ATTRIBUTE]
    assert vars(first)[BUFFER_ATTRIBUTE] is not vars(model.model.layers[0].mlp.experts)[BUFFER_ATTRIBUTE]


# What a parameter has to stand.


def assert_equal_stacks(ours, theirs):
    ours, theirs = stacks_of(ours), stacks_of(theirs)
    assert ours.keys() == theirs.keys()
    for name, stack in theirs.items():
        assert all(torch.equal(a, b) for a, b in zip(ours[name].stack, stack.stack)), name


def quantised(seed=0):
    model = build_tiny("qwen3_moe")
    if seed:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(generator=torch.Generator().manual_seed(seed))
    quantise_experts(model)
    return model


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_equal_and_share_nothing(duplicate):
    model = quantised()
    other = duplicate(model)
    assert_equal_stacks(other, model)
    for name, stack in stacks_of(other).items():
        assert isinstance(stack, nn.Parameter)
        assert not stack.requires_grad
        assert stack.stack.packed_EC.data_ptr() != stacks_of(model)[name].stack.packed_EC.data_ptr()


def test_moves_keep_numbers_and_names():
    model = quantised()
    names, before = list(dict(model.named_parameters())), copy.deepcopy(model)
    model.to(torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert_equal_stacks(model, before)
    stack = next(iter(stacks_of(model).values()))
    assert stack.dense().dtype is torch.bfloat16
    model.to("meta")
    assert {part.device.type for stack in stacks_of(model).values() for part in stack.stack} == {"meta"}
    model.to_empty(device="cpu")
    assert {part.device.type for stack in stacks_of(model).values() for part in stack.stack} == {"cpu"}
    model.load_state_dict(before.state_dict())
    assert_equal_stacks(model, before)
    assert list(dict(model.named_parameters())) == names


def test_data_brings_its_numbers_along():
    ours, theirs = (next(iter(stacks_of(quantised(seed)).values())) for seed in (1, 2))
    ours.data = theirs.data
    assert torch.equal(ours.dense(), theirs.dense())
    with pytest.raises(UnsupportedModelError, match="load a state dict"):
        ours.data = torch.zeros(ours.shape)


@pytest.mark.parametrize("is_assigned", [False, True])
def test_a_state_dict_goes_through_safetensors(tmp_path, is_assigned):
    model, other = quantised(), quantised(seed=5)
    state = model.state_dict()
    assert {type(value) for value in state.values()} == {torch.Tensor}
    name = "model.layers.0.mlp.experts.down_proj"
    stack = stacks_of(model)[name].stack
    named = {"": 0, ".absmax": 1, ".nested_absmax": 2, ".offset": 3, ".quant_map": 4, ".nested_quant_map": 5}
    assert all(torch.equal(state[name + part], stack[place]) for part, place in named.items())
    save_file(state, tmp_path / "model.safetensors")
    other.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=is_assigned)
    assert_equal_stacks(other, model)
    assert all(isinstance(parameter, nn.Parameter) for parameter in other.parameters())
    ids = torch.arange(3, 12)[None]
    assert torch.equal(model(input_ids=ids).logits, other(input_ids=ids).logits)


def test_a_state_dict_goes_through_torch_with_weights_only():
    model, other, file = quantised(), quantised(seed=5), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert_equal_stacks(other, model)


def test_a_dense_state_dict_is_quantised_as_it_is_loaded():
    dense, other = build_tiny("qwen3_moe"), quantised(seed=5)
    other.load_state_dict(dense.state_dict())
    assert_equal_stacks(other, quantised())


def test_state_dicts_that_do_not_fit_are_refused():
    model = quantised()
    lost = {
        key: value
        for key, value in model.state_dict().items()
        if not key.endswith("layers.0.mlp.experts.down_proj.offset")
    }
    with pytest.raises(RuntimeError, match=r"Missing key.*layers\.0\.mlp\.experts\.down_proj\.offset"):
        model.load_state_dict(lost)
    short = {
        key: value[:1] if key.endswith("layers.0.mlp.experts.down_proj") else value
        for key, value in model.state_dict().items()
    }
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(short)


def test_adapter_files_hold_no_experts():
    model = quantised()
    adapted = add_lora(model)
    names = list(get_peft_model_state_dict(adapted))
    assert names
    assert all("lora_" in name for name in names)
    assert {name for name, parameter in adapted.named_parameters() if parameter.requires_grad} == {
        name for name, _ in adapted.named_parameters() if "lora_" in name
    }


def test_undone_router_leaves_the_stacks():
    model = quantised()
    before, patcher = copy.deepcopy(model), ModelPatcher()
    install_bincount_router(model, patcher)
    patcher.undo()
    assert_equal_stacks(model, before)


# What cannot be.


def test_sizes_that_are_no_multiple_of_a_block_are_refused_before_anything_changes():
    model = build_tiny("qwen3_moe", moe_intermediate_size=25)
    with pytest.raises(
        UnsupportedModelError,
        match="down_proj has 32 x 25 = 800 weights per expert, and NF4 needs multiples of 64",
    ):
        quantise_experts(model)
    assert not stacks_of(model)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.float64])
def test_other_formats_are_refused(dtype):
    model = build_tiny("qwen3_moe")
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.detach().to(dtype), requires_grad=False)
    with pytest.raises(UnsupportedModelError, match=r"Mxfp4Config\(dequantize=True\)"):
        quantise_experts(model)
    assert not stacks_of(model)


def test_mxfp4_experts_are_refused_by_name():
    class Mxfp4GptOssExperts(nn.Module):
        pass

    with pytest.raises(UnsupportedModelError, match=r"0 is a Mxfp4GptOssExperts.*Mxfp4Config\(dequantize=True\)"):
        quantise_experts(nn.Sequential(Mxfp4GptOssExperts()))


def test_trained_experts_are_refused():
    model = quantised()
    install_bincount_router(model, ModelPatcher())
    model.requires_grad_(True)
    with pytest.raises(UnsupportedModelError, match="requires a gradient, but NF4 cannot be trained"):
        step(model)


@pytest.mark.parametrize(
    "write", [lambda stack: stack.add_(1.0), lambda stack: stack.normal_(), lambda stack: stack.data.mul_(2.0)]
)
def test_nothing_writes_in_place(write):
    stack = next(iter(stacks_of(quantised()).values()))
    before = stack.dense()
    with torch.no_grad(), pytest.raises(UnsupportedModelError, match="cannot be trained or merged"):
        write(stack)
    assert torch.equal(stack.dense(), before)


def test_dense_values_are_not_quantised_a_second_time_in_passing():
    stack = next(iter(stacks_of(quantised()).values()))
    with torch.no_grad(), pytest.raises(UnsupportedModelError, match="Under DDP exclude these parameters"):
        stack.copy_(stack.dense())


def test_merging_is_refused():
    with pytest.raises(UnsupportedModelError, match="load the model without quantization to merge"):
        add_lora(quantised()).merge_and_unload()


def test_bitsandbytes_is_asked_for(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes.functional", None)
    with pytest.raises(MissingDependencyError, match="qlora"):
        quantise_stack(torch.zeros(2, 8, 8))
