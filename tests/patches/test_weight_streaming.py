"""Streamed weights and the embedding on the host: every loss and gradient bit-equal to the resident model, and
everything given back.
"""

import copy
import functools
import random

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_fastft.activations.frozen_weights import frozen_bytes
from lightning_fastft.activations.host_parameter import HostParameter
from lightning_fastft.activations.streams import CopyStreams
from lightning_fastft.core.errors import HostMemoryError, OptionError, SwapError, UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.fused.low_precision_adapters import install_low_precision_adapters
from lightning_fastft.hf.expert_nf4_tensor import ExpertsNF4
from lightning_fastft.hf.families import decoder_layers
from lightning_fastft.hf.loading.model import build_model
from lightning_fastft.hf.loading.source import ModelSource
from lightning_fastft.hf.lora import add_adapters
from lightning_fastft.moe.install import install_bincount_router
from lightning_fastft.patches.host_ends import HostEmbedding, install_host_embedding
from lightning_fastft.patches.weight_streaming import install_weight_streaming
from tests.support.children import thinned
from tests.support.host_waits import count_host_waits
from tests.support.late_streams import LateStreams
from tests.support.sizes import tiny_qwen3
from tests.support.tiny_models import build_tiny

pytestmark = pytest.mark.covering

CPU = torch.device("cpu")
NF4_CONFIG = tiny_qwen3(width=64, inner=128, tie_word_embeddings=False)


def base_model(name, num_layers):
    if name == "nf4":
        source = ModelSource({**NF4_CONFIG, "num_hidden_layers": num_layers}, init="random")
        return build_model(source, device=CPU, dtype=torch.bfloat16, quantization="nf4")
    if name.startswith("nf4 experts"):
        experts = {
            "model_type": "qwen3_moe",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 1,
        }
        source = ModelSource({**NF4_CONFIG, **experts, "num_hidden_layers": num_layers}, init="random")
        return build_model(source, device=CPU, dtype=torch.bfloat16, quantization="nf4")
    options = {"layer_types": (["sliding_attention", "full_attention"] * 4)[:num_layers]} if "gemma" in name else {}
    model = build_tiny(name.removesuffix(" routed"), num_hidden_layers=num_layers, **options)
    return model.bfloat16() if name == "llama" else model


def lora_model(name="llama", num_layers=5, *, recomputes=False, **options):
    """A PEFT model whose adapters do something, in training mode."""
    base = base_model(name, num_layers)
    model = add_adapters(base, lora=LoraConfig(r=4, lora_dropout=0.0, **options), adapter_dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.05)
    if recomputes:
        run_again = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        base._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=run_again)
    return model.train()


def install(model, *, seed=None, streams=None, **options):
    patcher = ModelPatcher()
    streams = streams or LateStreams(seed=seed)
    status, streamer = install_weight_streaming(model.get_base_model(), patcher, streams=streams, **options)
    for target in streamer._targets:
        target.fill_(0xFF)
    assert status.state == "active"
    return streamer, patcher


def make_ids(seed, length=9):
    return torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(seed))


def forward(model, seed):
    ids = make_ids(seed)
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def take(model):
    gradients = [
        parameter.grad for parameter in model.parameters() if parameter.requires_grad and parameter.grad is not None
    ]
    assert len(gradients) > 4
    assert sum(float(gradient.abs().sum()) > 0 for gradient in gradients) > len(gradients) // 2
    model.zero_grad(set_to_none=True)
    return gradients


def evaluate(model, seed):
    model.eval()
    with torch.no_grad():
        loss = forward(model, seed)
    model.train()
    return loss


def plain_steps(model):
    """Steps of one, and of three accumulated batches."""
    results = []
    for batches in ((1,), (2, 3, 4), (5,)):
        for seed in batches:
            loss = forward(model, seed)
            loss.backward()
            results.append(loss.detach())
        results += take(model)
    return results


def two_forwards_before_two_backwards(model):
    losses = [forward(model, 1), forward(model, 2)]
    losses[1].backward()
    losses[0].backward()
    again = [forward(model, 3), forward(model, 4)]
    sum(again).backward()
    return [loss.detach() for loss in losses + again] + take(model)


def evaluation_between(model):
    results = [evaluate(model, 1)]
    loss = forward(model, 2)
    results.append(evaluate(model, 3))
    loss.backward()
    with torch.inference_mode():
        results.append(forward(model, 4).clone())
    forward(model, 5).backward()
    return results + take(model)


def generation_between(model):
    model.eval()
    written = model.generate(input_ids=make_ids(1), max_new_tokens=5, do_sample=False, eos_token_id=None)
    model.train()
    forward(model, 5).backward()
    return [written, *take(model)]


SCRIPTS = [plain_steps, two_forwards_before_two_backwards, evaluation_between, generation_between]


def assert_same(results, expected):
    assert len(results) == len(expected)
    for number, (result, truth) in enumerate(zip(results, expected)):
        assert torch.equal(result, truth), number


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("num_layers", range(2, 8))
def test_steps_are_bit_equal_for_any_number_of_layers(num_layers, recomputes):
    model = lora_model(num_layers=num_layers, recomputes=recomputes)
    expected = plain_steps(model)
    _, patcher = install(model)
    assert_same(plain_steps(model), expected)
    patcher.undo()
    assert_same(plain_steps(model), expected)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("script", SCRIPTS[1:])
def test_other_orders_are_bit_equal(script, recomputes):
    model = lora_model(num_layers=5, recomputes=recomputes)
    expected = script(model)
    for seed in (None, 1, 2):
        _, patcher = install(model, seed=seed)
        assert_same(script(model), expected)
        assert_same(script(model), expected)
        patcher.undo()


# Each family once, with the layers recomputed or not in turn, and nf4 with both.
FAMILIES = ("nf4", "nf4 experts", "nf4 experts routed", "qwen3_moe", "qwen3_moe routed", "gemma3_text", "phi3")


@pytest.mark.parametrize(
    ("name", "recomputes"),
    thinned(FAMILIES, (False, True), keep=lambda family, recomputes: family == 0 or family % 2 == recomputes),
)
def test_families_and_nf4_are_bit_equal(name, recomputes):
    model = lora_model(name, num_layers=4, recomputes=recomputes)
    if name.endswith("routed"):
        install_bincount_router(model, ModelPatcher())
    expected = plain_steps(model) + evaluation_between(model)
    streamer, patcher = install(model)
    assert_same(plain_steps(model) + evaluation_between(model), expected)
    frozen = [
        parameter
        for parameter in nn.ModuleList(decoder_layers(model.get_base_model())).parameters()
        if not parameter.requires_grad
    ]
    assert streamer.num_host_bytes >= sum(num_bytes_of(parameter) for parameter in frozen)
    patcher.undo()
    assert_same(plain_steps(model) + evaluation_between(model), expected)


def test_packed_experts_count_as_what_they_take():
    layer = decoder_layers(lora_model("nf4 experts", num_layers=2).get_base_model())[0]
    frozen = [parameter for parameter in layer.parameters() if not parameter.requires_grad]
    assert frozen_bytes(layer) < sum(parameter.numel() * parameter.element_size() for parameter in frozen)
    assert frozen_bytes(layer) >= sum(num_bytes_of(parameter) for parameter in frozen)


def num_bytes_of(parameter):
    if not isinstance(parameter, ExpertsNF4):
        return parameter.numel() * parameter.element_size()
    # Four bits a weight, a byte for 64 of them, and what comes once.
    assert parameter.numel() // 2 + parameter.numel() // 64 <= parameter.held_bytes < parameter.numel()
    return parameter.numel() // 2 + parameter.numel() // 64


class RecordingLanes(LateStreams):
    """Write down marks, copies and waits."""

    def __init__(self):
        super().__init__()
        self.log = ""

    def mark_compute(self):
        self.log += "m"
        return super().mark_compute()

    def wait_compute(self, mark):
        self.log += "w"
        super().wait_compute(mark)

    def copy_in(self, device, host, *, after):
        self.log += "c"
        return super().copy_in(device, host, after=after)


@pytest.mark.parametrize("num_slots", [2, 3])
@pytest.mark.parametrize("recomputes", [False, True])
def test_every_layer_is_on_its_way_before_forward_and_backward_reach_it(recomputes, num_slots):
    model = lora_model(num_layers=7, recomputes=recomputes)
    streams = RecordingLanes()
    install(model, streams=streams, num_slots=num_slots)
    forward(model, 1).backward()
    streams.log = ""
    forward(model, 2).backward()
    assert streams.log.count("c") == 2 * (7 - num_slots)
    assert streams.log.count("w") == 2 * 6
    # A copy between leaving a layer and waiting for the next one would be one that compute waits for.
    assert "mcw" not in streams.log


def test_the_router_loss_reaches_its_layers():
    """Gradients enter a layer by its router, too, not only by its output."""
    model = lora_model("qwen3_moe", num_layers=4)

    def step():
        ids = make_ids(1)
        output = model(input_ids=ids, labels=ids, use_cache=False, output_router_logits=True)
        (output.loss + output.aux_loss).backward()
        return [output.loss.detach(), *take(model)]

    expected = step()
    install(model)
    assert_same(step(), expected)
    assert_same(step(), expected)


@pytest.mark.parametrize("name", ["nf4", "llama"])
@pytest.mark.parametrize("is_dora", [False, True])
def test_copies_of_adapters_and_streaming_together(name, is_dora):
    model = lora_model(name, num_layers=4, use_dora=is_dora)
    copies = install_low_precision_adapters(model, ModelPatcher(), compute_dtype=torch.bfloat16)
    expected = plain_steps(model)
    install(model)
    assert_same(plain_steps(model), expected)
    # Between two passes the slots hold other layers.
    copies.refresh(is_after_step=True)
    assert_same(plain_steps(model), expected)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_in_the_middle_and_then_a_clean_step(where, recomputes):
    model = lora_model(num_layers=6, recomputes=recomputes)
    expected = plain_steps(model)
    _, patcher = install(model)
    mlp = decoder_layers(model.get_base_model())[3].mlp

    def fail(*args):
        raise RuntimeError("planted")

    if where == "forward":
        handle = mlp.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="planted"):
            forward(model, 1)
    else:
        handle = mlp.register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
        with pytest.raises(RuntimeError, match="planted"):
            forward(model, 1).backward()
    handle.remove()
    model.zero_grad(set_to_none=True)
    assert_same(plain_steps(model), expected)
    handle = mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        forward(model, 1)
    handle.remove()
    patcher.undo()
    assert_same(plain_steps(model), expected)


@pytest.mark.parametrize("name", ["llama", "nf4"])
def test_undo_gives_back_every_byte_object_and_hook(name):
    model = lora_model(name, num_layers=4)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    hooks = [
        (len(module._forward_pre_hooks), len(module._forward_hooks), len(module._state_dict_hooks))
        for module in model.modules()
    ]
    _, patcher = install(model)
    weight = decoder_layers(model.get_base_model())[1].mlp.up_proj.base_layer.weight
    assert (type(weight) is HostParameter) is (name == "llama")
    # A move that changes nothing reads nothing.
    model.to("cpu")
    assert name == "nf4" or weight.to(torch.device("cpu"), weight.dtype) is weight
    forward(model, 1)
    patcher.undo()
    patcher.undo()
    assert_same(list(model.state_dict().values()), list(before.values()))
    assert all(parameter is parameters[key] for key, parameter in model.named_parameters())
    assert hooks == [
        (len(module._forward_pre_hooks), len(module._forward_hooks), len(module._state_dict_hooks))
        for module in model.modules()
    ]
    assert not any(module._load_state_dict_pre_hooks for module in decoder_layers(model.get_base_model()))
    _, patcher = install(model)
    forward(model, 2).backward()
    patcher.undo()


@pytest.mark.parametrize("name", ["llama", "nf4"])
def test_state_dicts_and_adapter_files_have_the_real_weights(name, tmp_path):
    model = lora_model(name, num_layers=4)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    install(model)
    install_host_embedding(model.get_base_model(), ModelPatcher(), streams=LateStreams())
    forward(model, 1)
    found = model.state_dict()
    assert found.keys() == before.keys()
    assert_same(list(found.values()), list(before.values()))
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    again = PeftModel.from_pretrained(base_model(name, 4), tmp_path)
    assert_same(
        [value for key, value in again.state_dict().items() if "lora" in key],
        [value for key, value in before.items() if "lora" in key],
    )


def test_a_full_save_while_streamed_can_be_read(tmp_path):
    model = lora_model("llama", num_layers=4).get_base_model()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    install_weight_streaming(model, ModelPatcher(), streams=LateStreams())
    forward(model, 1)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert_same([found[key] for key in before], list(before.values()))


def test_loading_adapters_works_and_loading_streamed_weights_is_refused():
    model = lora_model(num_layers=4)
    adapters = {key: value.clone() for key, value in model.state_dict().items() if "lora" in key}
    whole = {key: value.clone() for key, value in model.state_dict().items()}
    _, patcher = install(model)
    model.load_state_dict(adapters, strict=False)
    with pytest.raises(SwapError, match="Load the model first"):
        model.load_state_dict(whole)
    patcher.undo()
    model.load_state_dict(whole)


def test_what_is_streamed_and_what_stays():
    model = lora_model("nf4", num_layers=4)
    model.add_adapter("second", LoraConfig(r=2))
    streamer, _ = install(model)
    layer = decoder_layers(model.get_base_model())[2]
    slot = streamer._targets[2].untyped_storage().data_ptr()
    streamed = {name for name, parameter in layer.named_parameters() if parameter.untyped_storage().data_ptr() == slot}
    assert streamed == {name for name, parameter in layer.named_parameters() if "lora" not in name}
    # The second adapter is frozen now and may be trained later.
    assert (
        sum("lora_A.second" in name for name, parameter in layer.named_parameters() if not parameter.requires_grad) == 2
    )
    state = layer.mlp.up_proj.base_layer.weight.quant_state
    assert [tensor.untyped_storage().data_ptr() == slot for tensor in (state.absmax, state.state2.absmax)] == [
        True,
        True,
    ]
    assert not any(
        tensor.untyped_storage().data_ptr() == slot for tensor in (state.code, state.state2.code, state.offset)
    )
    assert streamer.num_slot_bytes < streamer.num_host_bytes


def test_a_step_waits_no_more_often_than_the_resident_model():
    model = lora_model(num_layers=4, recomputes=True)
    totals = []
    for is_streamed in (False, True):
        if is_streamed:
            install(model, streams=CopyStreams())
            install_host_embedding(model.get_base_model(), ModelPatcher(), streams=CopyStreams())
        with count_host_waits() as waits:
            forward(model, 1).backward()
        totals.append(waits.total)
    # Transformers' own masks wait, once per forward.
    assert totals[0] == totals[1] <= 1


class WithoutWait(LateStreams):
    def wait_compute(self, mark):
        pass


def test_a_wait_that_is_missing_is_seen():
    model = lora_model()
    expected = plain_steps(model)
    install(model, streams=WithoutWait())
    with pytest.raises(AssertionError):
        assert_same(plain_steps(model), expected)


@pytest.mark.parametrize("fault", ["wrong slot", "no backward hook", "never copied"])
def test_a_slot_overwritten_early_or_never_filled_is_seen(fault, monkeypatch):
    model = lora_model()
    expected = plain_steps(model)
    streamer, _ = install(model)
    fetch = streamer._fetch
    if fault == "wrong slot":
        # The prefetch lands in the slot of the layer in use.
        monkeypatch.setattr(
            streamer, "_fetch", lambda index: fetch(index) if streamer._current is None else overwrite(streamer)
        )
    elif fault == "no backward hook":
        monkeypatch.setattr(
            streamer,
            "use",
            lambda index, direction: type(streamer).use(streamer, index, direction=1) if direction > 0 else None,
        )
    else:
        monkeypatch.setattr(streamer, "_fetch", lambda index: fetch(index) if index < 3 else None)
    with pytest.raises(AssertionError):
        assert_same(plain_steps(model), expected)


def overwrite(streamer):
    other = (streamer._current + 1) % len(streamer._host)
    size = min(streamer._host[other].numel(), streamer._targets[streamer._current].numel())
    streamer.streams.wait_compute(
        streamer.streams.copy_in(streamer._targets[streamer._current][:size], streamer._host[other][:size], after=[])
    )


def test_models_that_cannot_be_streamed_are_refused():
    trained = build_tiny("llama")
    with pytest.raises(OptionError, match="every weight"):
        install_weight_streaming(trained, ModelPatcher(), streams=CopyStreams())

    tied = build_tiny("llama").requires_grad_(False)
    tied.model.layers[1].mlp.up_proj.weight = tied.model.layers[0].mlp.up_proj.weight
    with pytest.raises(OptionError, match="shares memory"):
        install_weight_streaming(tied, ModelPatcher(), streams=CopyStreams())

    outside = build_tiny("llama").requires_grad_(False)
    outside.model.extra = nn.Linear(2, 2)
    outside.model.extra.weight = outside.model.layers[1].mlp.up_proj.weight
    with pytest.raises(OptionError, match=r"mlp.up_proj.weight of decoder layer 1 is also model.extra.weight"):
        install_weight_streaming(outside, ModelPatcher(), streams=CopyStreams())

    eight_bits = build_tiny("llama").requires_grad_(False)
    eight_bits.model.layers[0].mlp.up_proj.weight.SCB = None
    with pytest.raises(UnsupportedModelError, match="8-bit"):
        install_weight_streaming(eight_bits, ModelPatcher(), streams=CopyStreams())


def test_sharded_weights_are_refused_by_name(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    model = build_tiny("llama").requires_grad_(False)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    for install_one in (install_weight_streaming, install_host_embedding):
        with pytest.raises(UnsupportedModelError, match="DTensor"):
            install_one(model, ModelPatcher(), streams=CopyStreams())


def test_a_model_that_is_moved_meanwhile_is_refused():
    model = lora_model(num_layers=4)
    install(model)
    forward(model, 1)
    layer = decoder_layers(model.get_base_model())[1]
    with pytest.raises(SwapError, match="double got a frozen weight"):
        layer.double()
    weight = layer.mlp.up_proj.base_layer.weight
    weight.data = torch.zeros(weight.shape, dtype=weight.dtype)
    with pytest.raises(SwapError, match=r"of layer 1 .*was moved or replaced"):
        forward(model, 2)


# Reads of values that are on the host.

READS = (
    lambda weight: float(weight.norm()),
    lambda weight: weight[0].tolist(),
    lambda weight: weight.data.mul_(2.0),
    lambda weight: weight.detach().float(),
    lambda weight: nn.functional.linear(torch.ones(weight.shape[1]), weight),
)


@pytest.mark.parametrize("read", READS)
def test_values_of_a_layer_that_is_not_in_use_cannot_be_read(read):
    model = lora_model("qwen3_moe", num_layers=4)
    _, patcher = install(model)
    weights = [layer.self_attn.o_proj.base_layer.weight for layer in decoder_layers(model.get_base_model())]
    expected = [model.state_dict()[name] for name, each in model.named_parameters() if any(each is w for w in weights)]
    forward(model, 1).backward()
    # The backward ends with layer 0, whose weights are there.
    assert torch.equal(weights[0], expected[0])
    for weight, values in zip(weights[1:], expected[1:], strict=True):
        assert (weight.shape, weight.dtype, weight.device) == (values.shape, values.dtype, values.device)
        with pytest.raises(SwapError, match="state_dict"):
            read(weight)
    patcher.undo()
    for weight, values in zip(weights, expected, strict=True):
        assert type(weight) is nn.Parameter
        assert torch.equal(weight, values)


@pytest.mark.parametrize("name", ["llama", "nf4"])
def test_adapters_are_not_merged_into_another_layer(name):
    model = lora_model(name, num_layers=3)
    expected = forward(model, 1)
    _, patcher = install(model)
    with pytest.raises(SwapError, match="Merge after the run"):
        model.merge_adapter()
    assert torch.equal(forward(model, 1), expected)
    patcher.undo()
    model.merge_adapter()


# The embedding.


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3_text", "granite", "nf4"])
def test_embedding_on_the_host_changes_no_bit(name):
    model = lora_model(name, num_layers=2)
    base = model.get_base_model()
    old, weight = base.get_input_embeddings(), base.get_input_embeddings().weight
    before = weight.clone()
    expected = plain_steps(model) + evaluation_between(model)
    patcher = ModelPatcher()
    status = install_host_embedding(base, patcher, streams=LateStreams())
    assert status.state == "active", status.reason
    new = base.get_input_embeddings()
    assert isinstance(new, HostEmbedding)
    assert isinstance(new, type(old))
    assert new.weight is weight
    assert weight.shape == before.shape
    assert weight.untyped_storage().nbytes() == weight.element_size()
    for read in READS:
        with pytest.raises(SwapError, match="state_dict"):
            read(weight)
    assert_same(plain_steps(model) + evaluation_between(model), expected)
    patcher.undo()
    assert base.get_input_embeddings() is old
    assert torch.equal(weight, before)
    assert_same(plain_steps(model) + evaluation_between(model), expected)


def test_embedding_generates_and_keeps_its_padding_row():
    model = lora_model(num_layers=2)
    base = model.get_base_model()
    assert base.get_input_embeddings().padding_idx == 0
    expected = base.get_input_embeddings()(torch.tensor([[0, 5]]))
    written = generation_between(model)
    install_host_embedding(base, ModelPatcher(), streams=LateStreams())
    assert torch.equal(base.get_input_embeddings()(torch.tensor([[0, 5]])), expected)
    assert_same(generation_between(model), written)


def test_embedding_and_weights_together():
    model = lora_model(num_layers=5, recomputes=True)
    expected = plain_steps(model)
    streamer, patcher = install(model)
    install_host_embedding(model.get_base_model(), patcher, streams=streamer.streams)
    assert_same(plain_steps(model), expected)
    # Neither the layers nor the embedding hold their values.
    for part in (model, model.get_base_model().model.layers, model.get_input_embeddings()):
        with pytest.raises(SwapError, match="state_dict"):
            copy.deepcopy(part)
    patcher.undo()
    copy.deepcopy(model)
    assert_same(plain_steps(model), expected)


class OddEmbedding(nn.Embedding):
    def forward(self, input):
        return nn.functional.embedding(input, self.weight) + 1


def test_embeddings_that_have_to_stay_say_why():
    def status_of(model):
        before = model.get_input_embeddings().weight.clone()
        embedding = model.get_input_embeddings()
        status = install_host_embedding(model, patcher, streams=LateStreams())
        assert status.state == "inactive"
        assert len(patcher) == 0
        assert model.get_input_embeddings() is embedding
        assert torch.equal(embedding.weight, before)
        assert not embedding._state_dict_hooks
        return status.reason

    patcher = ModelPatcher()
    assert status_of(build_tiny("llama")) == "it is trained"
    assert "tied" in status_of(build_tiny("llama", tie_word_embeddings=True).requires_grad_(False))
    capped = build_tiny("llama").requires_grad_(False)
    capped.model.embed_tokens.max_norm = 1.0
    assert "max_norm" in status_of(capped)
    odd = build_tiny("llama").requires_grad_(False)
    odd.model.embed_tokens = OddEmbedding(97, 32).requires_grad_(False)
    assert "in another way" in status_of(odd)
    other = build_tiny("llama").requires_grad_(False)
    other.model.embed_tokens = nn.Linear(32, 97)
    assert "not a plain embedding" in status_of(other)
    active = build_tiny("llama").requires_grad_(False)
    assert install_host_embedding(active, patcher, streams=LateStreams()).state == "active"
    assert "not a plain embedding" in install_host_embedding(active, patcher, streams=LateStreams()).reason


def test_embedding_state_dict_and_memory_that_does_not_do():
    model = build_tiny("gemma2").requires_grad_(False)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for allocate in (lambda n: torch.empty(n - 1, dtype=torch.uint8), None):
        with pytest.raises(HostMemoryError, match="input embedding"):
            install_host_embedding(
                model,
                ModelPatcher(),
                streams=LateStreams() if allocate else CopyStreams(torch.device("cuda")),
                allocate_host=allocate,
            )
    assert install_host_embedding(model, ModelPatcher(), streams=LateStreams()).state == "active"
    assert_same([model.state_dict()[key] for key in before], list(before.values()))
    with pytest.raises(SwapError, match="Load the model first"):
        model.load_state_dict(before)


def test_random_orders_of_many_models_on_one_pair_of_lanes():
    streams = LateStreams(seed=3)
    models = [lora_model(num_layers=3), lora_model(num_layers=4, recomputes=True)]
    expected = [plain_steps(model) for model in models]
    for model in models:
        install(model, streams=streams)
    rng = random.Random(0)
    for _ in range(4):
        index = rng.randrange(2)
        assert_same(plain_steps(models[index]), expected[index])
