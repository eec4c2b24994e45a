"""Recorded layers: the numbers of layers that run as ever, whatever packs come, and layers as ever wherever a
recording would not be exact.
"""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.core.errors import ShapeError, SwapError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.fused import fp8_weights
from lightning_fastft.fused.install import install_fp8_base
from lightning_fastft.fused.low_precision_adapters import install_low_precision_adapters
from lightning_fastft.graphs.install import install_layer_graphs
from lightning_fastft.graphs.layer_graphs import GRAPH_ATTRIBUTE, LayerGraphs
from lightning_fastft.hf.lora import adapters_off
from lightning_fastft.patches.packed import install_packed_training
from tests.fused.test_decoder import quantised
from tests.fused.test_fp8_base import write_larger_rows
from tests.support.layer_pairs import add_lora, build, fuse, layers_of
from tests.support.packs import make_batch, relative_error
from tests.support.two_ranks import run_two_ranks

pytestmark = pytest.mark.covering

# Packs of 32 tokens: documents of one kind, then of two others.
PACKS = (
    (7, 1, 12, 12),
    (12, 9, 11),
    (10, 11, 11),
    (16, 16),
    (7, 9, 8, 8),
    (15, 10, 7),
    (32,),
    (5, 27),
    (9, 9, 14),
    (31, 1),
)
# Packs of 49 to 64 tokens, each of another length.
RAGGED = tuple(
    tuple(length for length in (23, num_tokens % 7, 17, num_tokens - 40 - num_tokens % 7) if length)
    for num_tokens in (61, 53, 58, 50, 64, 49, 57, 62, 55, 60, 51, 63, 59, 52, 56, 54)
)
CPU = frozenset({"sdpa", "reference"})


class Repeating:
    """Runs work again where CUDA would run what was recorded of it, in the same memory; recording runs it too, as
    that of CUDA does not.
    """

    def __init__(self):
        self.num_recorded = 0

    def record(self, work):
        self.num_recorded += 1
        work()
        done = [True]

        def again():
            if done:
                done.clear()
            else:
                work()

        return again


def shared_memory(layer):
    return [*layer.mlp.parameters()][:1]


def install(model, *, policy="keep", recorder=None):
    """Fuse, attach a policy, and record; return the graphs."""
    patcher = ModelPatcher()
    fuse(model)
    install_packed_training(model, patcher, checkpointing=OffloadCheckpointing(policy))
    graphs = LayerGraphs(layers_of(model), memory_of=shared_memory, recorder=recorder or Repeating(), backends=CPU)
    graphs.install(patcher)
    return graphs, patcher


def twins(family, trained, *, policy="keep", **overrides):
    """A model whose layers are recorded, and its equal without."""
    model = build(family, trained, **overrides)
    plain = copy.deepcopy(model)
    fuse(plain)
    install_packed_training(plain, ModelPatcher(), checkpointing=OffloadCheckpointing(policy))
    graphs, _ = install(model, policy=policy)
    return model, plain, graphs


def trained_parameters(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def train(model, packs=PACKS, *, accumulate=1, rate=0.05, options=None, pad_to=(None,)):
    """Steps of plain gradient descent on packs with so many tokens, the last number for all further ones; losses and
    the gradients of every step.
    """
    losses, gradients = [], []
    for number, lengths in enumerate(packs):
        num_tokens = pad_to[min(number, len(pad_to) - 1)]
        loss = model(**make_batch(lengths, seed=number, pad_to=num_tokens), **(options or {})).loss
        loss.backward()
        losses.append(loss.detach())
        if (number + 1) % accumulate:
            continue
        found = trained_parameters(model)
        gradients.append(
            {name: parameter.grad.clone() for name, parameter in found.items() if parameter.grad is not None}
        )
        with torch.no_grad():
            for parameter in found.values():
                if parameter.grad is not None:
                    parameter -= rate * parameter.grad
        model.zero_grad(set_to_none=True)
    return losses, gradients


def assert_same(found, expected):
    for loss, other in zip(found[0], expected[0], strict=True):
        assert torch.equal(loss, other)
    for own, other in zip(found[1], expected[1], strict=True):
        assert own.keys() == other.keys()
        assert all(torch.equal(own[name], other[name]) for name in other)
        assert all(value.abs().sum() > 0 for value in other.values())


@pytest.mark.parametrize("policy", ["keep", "recompute"])
@pytest.mark.parametrize(
    ("family", "trained"),
    [("qwen3", "lora"), ("qwen3", "full"), ("llama", "norms"), ("qwen3_moe", "lora"), ("gemma3", "lora")],
)
def test_steps_are_bit_equal_to_those_without(family, trained, policy):
    model, plain, graphs = twins(family, trained, policy=policy)
    assert_same(train(model), train(plain))
    # Two layers, in every step but two.
    assert graphs.num_replays == 2 * (len(PACKS) - 2), graphs.reasons
    assert graphs.status().state == "active"
    assert "1 pack bucket" in graphs.status().reason


def test_recordings_are_counted():
    model, _, graphs = twins("qwen3", "lora")
    counts = []
    for number, lengths in enumerate(PACKS[:5]):
        model(**make_batch(lengths, seed=number)).loss.backward()
        counts.append(graphs.num_recordings)
    # Two packs warm up. The third one is recorded in both layers, and the others fit that recording.
    assert counts == [0, 0, 2, 2, 2]


@pytest.mark.parametrize("accumulate", [2, 3])
def test_gradients_of_a_window_add_up(accumulate):
    model, plain, graphs = twins("qwen3", "lora")
    packs = PACKS[:3] * 3
    assert_same(train(model, packs, accumulate=accumulate), train(plain, packs, accumulate=accumulate))
    assert graphs.num_replays > 0


@pytest.mark.parametrize("is_in_group", [False, True])
def test_weights_of_several_layers_have_the_sum_of_their_gradients(tmp_path, is_in_group):
    model = build("qwen3", "full")
    first, second = layers_of(model)
    second.mlp.down_proj.weight = first.mlp.down_proj.weight
    plain = copy.deepcopy(model)
    fuse(plain)
    install_packed_training(plain, ModelPatcher(), checkpointing=OffloadCheckpointing("keep"))
    graphs, _ = install(model)
    if is_in_group:
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert_same(train(model), train(plain))
    assert graphs.num_replays > 0


def test_weights_that_are_exchanged_are_recorded_again():
    model, plain, graphs = twins("qwen3", "full")
    for each in (model, plain):
        train(each)
        for layer in layers_of(each):
            layer.mlp.down_proj.weight = nn.Parameter(layer.mlp.down_proj.weight.detach() * 2)
    before = graphs.num_replays
    assert_same(train(model), train(plain))
    assert graphs.num_replays > before


def test_weights_in_pieces_of_the_first_fsdp_run_as_ever(tmp_path):
    run_two_ranks("tests.hf.fsdp1_worker", tmp_path)
    for use_orig_params in (True, False):
        plain, recorded = (
            torch.load(tmp_path / f"{use_orig_params}-{is_recorded}.pt", weights_only=True)
            for is_recorded in (False, True)
        )
        assert recorded["losses"] == plain["losses"]
        assert recorded["replays"] == 0
        assert recorded["reasons"] == ["weights are sharded"]


def test_gradients_that_are_zeroed_in_place_stay_right():
    model, plain, _ = twins("qwen3", "lora")
    for each in (model, plain):
        each.zero_grad = lambda set_to_none, each=each: nn.Module.zero_grad(each, set_to_none=False)
    assert_same(train(model), train(plain))


def test_copies_of_wide_adapters_are_read_where_they_lie():
    def narrow():
        torch.manual_seed(1)
        return add_lora(build("qwen3", "full").to(torch.bfloat16).requires_grad_(False), adapter_dtype=torch.float32)

    found = []
    for is_recorded in (True, False):
        model = narrow()
        copies = install_low_precision_adapters(model, ModelPatcher(), compute_dtype=torch.bfloat16)
        if is_recorded:
            graphs, _ = install(model)
        else:
            fuse(model)
            install_packed_training(model, ModelPatcher())
        losses, gradients = [], []
        for number, lengths in enumerate(PACKS):
            loss = model(**make_batch(lengths, seed=number)).loss
            loss.backward()
            losses.append(loss.detach())
            gradients.append({name: parameter.grad.clone() for name, parameter in trained_parameters(model).items()})
            with torch.no_grad():
                for parameter in trained_parameters(model).values():
                    # As a fused optimizer writes: no version counter shows it.
                    parameter.data.sub_(0.05 * parameter.grad)
            copies.refresh(is_after_step=True)
            model.zero_grad(set_to_none=True)
        found.append((losses, gradients))
    assert graphs.num_replays > 0
    assert_same(*found)


class Held(Repeating):
    """A graph has only launches: what a layer would quantise because its weights changed was recorded or is missing."""

    def __init__(self, monkeypatch, *, is_trained):
        super().__init__()
        self.is_replaying = False
        # A recording transposes only trained weights.
        for name in ("quantise_rows", "nf4_row_scales", *(() if is_trained else ("transpose",))):
            monkeypatch.setattr(fp8_weights, name, self._checked(getattr(fp8_weights, name)))

    def _checked(self, real):
        def checked(rows, **options):
            if self.is_replaying and (isinstance(rows, (nn.Parameter, list)) or rows.dtype is torch.float8_e4m3fn):
                raise AssertionError("a graph would read the weights of its recording")
            return real(rows, **options)

        return checked

    def record(self, work):
        again = super().record(work)

        def replay():
            self.is_replaying = True
            again()
            self.is_replaying = False

        return replay


def fp8_twins(trained, monkeypatch):
    """A model in fp8 whose layers are recorded, and its equal without."""
    wide = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    model = quantised(adapter_dtype=torch.bfloat16) if trained == "qlora" else build("qwen3", trained, **wide)
    plain = copy.deepcopy(model)
    fuse(plain)
    install_packed_training(plain, ModelPatcher())
    graphs, _ = install(model, recorder=Held(monkeypatch, is_trained=trained == "full"))
    bases = [install_fp8_base(each, ModelPatcher(), is_emulated=True)[0] for each in (model, plain)]
    assert all("8 products" in base.status().reason for base in bases)
    return model, plain, graphs


@pytest.mark.parametrize("trained", ["lora", "full", "qlora"])
def test_layers_in_fp8_are_quantised_outside_of_their_graphs(trained, monkeypatch):
    model, plain, graphs = fp8_twins(trained, monkeypatch)
    assert_same(train(model), train(plain))
    assert graphs.num_replays == 2 * (len(PACKS) - 2), graphs.reasons


@pytest.mark.parametrize("trained", ["lora", "full", "qlora"])
def test_graphs_read_weights_in_fp8_that_are_loaded_in_their_place(trained, monkeypatch):
    model, plain, graphs = fp8_twins(trained, monkeypatch)
    for each in (model, plain):
        train(each, PACKS[:4])
        with torch.no_grad():
            for name, parameter in each.named_parameters():
                if "down_proj" not in name or "lora" in name:
                    continue
                if trained == "qlora":
                    write_larger_rows(parameter)
                else:
                    parameter.mul_(1.5)
    before = graphs.num_replays
    assert_same(train(model), train(plain))
    assert graphs.num_replays == before + 2 * len(PACKS), graphs.reasons


def test_a_batch_that_runs_twice_before_its_backward_runs_as_ever():
    model, plain, graphs = twins("qwen3", "lora")
    train(model)
    train(plain)
    before = graphs.num_replays
    found = []
    for each in (model, plain):
        batch = make_batch(PACKS[0])
        loss = each(**batch).loss + each(**batch).loss
        # Two more, whose offsets and hidden states must not be put in the place of the first one's: one of the same
        # kind, one of another.
        for lengths in (PACKS[1], PACKS[6]):
            loss = loss + each(**make_batch(lengths)).loss
        loss.backward()
        found.append({name: parameter.grad.clone() for name, parameter in trained_parameters(each).items()})
    assert graphs.num_replays == before + 2
    for name, value in found[1].items():
        assert relative_error(found[0][name], value) < 1e-6


def test_a_forward_that_is_dropped_is_no_obstacle():
    model, _, graphs = twins("qwen3", "lora")
    train(model)
    model(**make_batch(PACKS[0]))
    before = graphs.num_replays
    train(model, PACKS[:1])
    assert graphs.num_replays == before + 2


def test_a_second_backward_is_refused():
    model, _, _ = twins("qwen3", "lora")
    train(model)
    loss = model(**make_batch(PACKS[0])).loss
    loss.backward(retain_graph=True)
    with pytest.raises(SwapError, match="econd backward"):
        loss.backward()


def test_weights_that_move_are_recorded_again_and_given_up_where_they_go_on_moving():
    model, plain, graphs = twins("qwen3", "lora")
    for number in range(8):
        assert_same(train(model, PACKS[:4]), train(plain, PACKS[:4]))
        weight = layers_of(model)[0].mlp.down_proj.base_layer.weight
        weight.data = weight.data.clone()
        if number == 0:
            assert graphs.num_replays > 0
    assert any("change from step to step" in reason for reason in graphs.reasons)


def test_adapters_whose_scale_changes_are_recorded_again():
    model, recorder = build("qwen3", "lora"), Repeating()
    install(model, recorder=recorder)
    train(model, PACKS[:4])
    before = recorder.num_recorded
    train(model, PACKS[:4])
    assert recorder.num_recorded == before
    layers_of(model)[0].mlp.gate_proj.scaling["default"] *= 0.5
    train(model, PACKS[:4])
    # Forward and backward of one layer.
    assert recorder.num_recorded == before + 2


def test_a_keyword_that_changes_from_call_to_call_is_named():
    model, plain, graphs = twins("qwen3", "lora")
    for number in range(3):
        options = {"tag": number // 2}
        assert_same(train(model, PACKS[:4], options=options), train(plain, PACKS[:4], options=options))
    # The last round has another one than the recording.
    assert graphs.reasons["tag changes from call to call"] == 2 * 4


@pytest.mark.parametrize("is_of_config", [True, False])
def test_hidden_states_that_are_asked_for_come_from_layers_that_run_as_ever(is_of_config):
    model, plain, graphs = twins("qwen3", "lora")
    options = {} if is_of_config else {"output_hidden_states": True}
    for each in (model, plain):
        each.config.output_hidden_states = is_of_config
    assert_same(train(model, options=options), train(plain, options=options))
    assert graphs.num_replays == 0
    assert graphs.reasons["output_hidden_states is requested"] > 0
    found, expected = (each(**make_batch(PACKS[0]), **options).hidden_states for each in (model, plain))
    assert len(found) == 3
    assert all(torch.equal(own, other) for own, other in zip(found, expected, strict=True))


def test_adapters_that_are_switched_off_and_on_are_noticed():
    model, plain, _ = twins("qwen3", "lora", hidden_size=64)
    for each in (model, plain):
        train(each)
        for parameter in each.parameters():
            parameter.requires_grad_(True)
    for _ in range(2):
        assert_same(train(model), train(plain))
        for each in (model, plain):
            layers_of(each)[0].mlp.gate_proj.scaling["default"] *= 0.5
    with model.disable_adapter(), plain.disable_adapter():
        found, expected = train(model, PACKS[:3], rate=0.0), train(plain, PACKS[:3], rate=0.0)
    assert_same((found[0], []), (expected[0], []))


def twins_with_trained_norms():
    """Twins whose second layer has no adapter but copies of its norms, far from the norms of the base."""
    torch.manual_seed(1)
    model = add_lora(
        build("qwen3", "full", hidden_size=64),
        layers_to_transform=[0],
        target_modules=["q_proj"],
        modules_to_save=["input_layernorm", "q_norm"],
    ).train()
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name:
            parameter.data.mul_(1.7)
    plain = copy.deepcopy(model)
    fuse(plain)
    install_packed_training(plain, ModelPatcher(), checkpointing=OffloadCheckpointing("keep"))
    graphs, _ = install(model)
    return model, plain, graphs


def test_norms_of_an_adapter_that_is_switched_off_are_not_replayed():
    model, plain, graphs = twins_with_trained_norms()
    for each in (model, plain):
        for name, parameter in each.named_parameters():
            # A part of the base is trained, and the norms are not: no flag of a parameter shows the switch.
            parameter.requires_grad_("modules_to_save" not in name)
    assert_same(train(model), train(plain))
    assert graphs.num_replays > 0
    with adapters_off(model), adapters_off(plain):
        (found, gradient), (expected, other) = train(model, PACKS[:3], rate=0.0), train(plain, PACKS[:3], rate=0.0)
    assert all(map(torch.equal, found, expected))
    assert all(torch.equal(gradient[0][name], other[0][name]) for name in other[0])


def test_hidden_states_that_get_a_gradient_later_are_recorded_again():
    model, plain, graphs = twins_with_trained_norms()
    assert_same(train(model), train(plain))
    for each in (model, plain):
        each.get_input_embeddings().requires_grad_(True)
    before = graphs.num_replays
    found, expected = train(model), train(plain)
    assert graphs.num_replays == before + 2 * len(PACKS)
    assert found[1][0].keys() == expected[1][0].keys()
    assert_same(found, expected)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_batch_with_and_without_its_adapter_before_one_backward(is_first):
    model, plain, graphs = twins("qwen3", "lora", hidden_size=64)
    found = []
    for each in (model, plain):
        train(each)
        # The base is trained too, so that both forwards have a gradient.
        each.requires_grad_(True)
        train(each, PACKS[:4])
        for number, lengths in enumerate(PACKS[:4]):
            batch = make_batch(lengths, seed=number)
            loss = each(**batch).loss if is_first else 0.0
            with each.disable_adapter():
                loss = loss + 2 * each(**batch).loss
            loss = loss if is_first else loss + each(**batch).loss
            loss.backward()
            gradients = {name: value.grad.clone() for name, value in each.named_parameters() if value.grad is not None}
            found.append((loss.detach(), gradients))
            each.zero_grad(set_to_none=True)
    assert graphs.num_replays > 0
    for (loss, own), (expected, other) in zip(found[:4], found[4:], strict=True):
        assert torch.equal(loss, expected)
        assert own.keys() == other.keys()
        assert all(relative_error(own[name], other[name]) < 1e-6 for name in other)


def test_evaluation_runs_as_ever_between_steps():
    model, plain, graphs = twins("qwen3", "lora")
    train(model, PACKS[:6])
    train(plain, PACKS[:6])
    before = graphs.num_replays
    with torch.no_grad():
        assert torch.equal(model(**make_batch(PACKS[3])).loss, plain(**make_batch(PACKS[3])).loss)
    assert graphs.num_replays == before
    assert_same(train(model), train(plain))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: layers_of(model)[0].mlp.register_forward_hook(lambda *_: None), "has hooks"),
        (
            lambda model: next(iter(trained_parameters(model).values())).register_hook(lambda grad: grad),
            "a parameter has hooks",
        ),
        (
            lambda model: next(iter(trained_parameters(model).values())).register_post_accumulate_grad_hook(
                lambda _: None
            ),
            "a parameter has hooks",
        ),
        (lambda model: setattr(layers_of(model)[0], "mlp_dropout", nn.Dropout(0.1)), "dropout"),
    ],
)
def test_what_a_recording_would_pass_over_runs_as_ever_and_is_named(change, reason):
    model, plain, graphs = twins("qwen3", "lora")
    for each in (model, plain):
        change(each)
    assert_same(train(model), train(plain))
    assert any(reason in found for found in graphs.reasons), graphs.reasons


@pytest.mark.parametrize("policy", ["keep", "recompute"])
@pytest.mark.parametrize(
    ("family", "trained"), [("qwen3", "lora"), ("qwen3", "full"), ("qwen3_moe", "lora"), ("gemma3", "lora")]
)
def test_packs_of_lengths_that_never_come_again_equal_padded_packs(family, trained, policy):
    model, plain, graphs = twins(family, trained, policy=policy)
    assert_same(train(model, RAGGED), train(plain, RAGGED, pad_to=(*map(sum, RAGGED[:2]), 64)))
    assert graphs.num_replays == 2 * (len(RAGGED) - 2), graphs.reasons
    # Both layers once: the longest of the first packs is rounded up to 64, and those to come are covered.
    assert graphs.num_recordings == 2
    assert {buffer.shape[1] for buffer in graphs._buffers.values()} == {64}


def test_a_pack_that_outgrows_the_recordings_replaces_them():
    model, plain, graphs = twins("qwen3", "lora")
    small, large = RAGGED[:6], [(30, 30, 30), (20, 31, 30), (32, 32, 28)]
    padded = [*map(sum, small[:2]), *[64] * 4, *[96] * 7]
    assert_same(train(model, small), train(plain, small, pad_to=padded))
    held = [weakref.ref(recording) for bucket in graphs.pack_buckets for recording in bucket.recordings.values()]
    packs = [*large, *small[2:]]
    assert_same(train(model, packs), train(plain, packs, pad_to=[96]))
    gc.collect()
    assert all(reference() is None for reference in held)
    assert graphs.num_recordings == 4
    assert [bucket.size.num_tokens for bucket in graphs.pack_buckets] == [96]
    assert {buffer.shape[1] for buffer in graphs._buffers.values()} == {96}


def test_nan_of_an_earlier_pack_does_not_stay_behind_the_tokens():
    model, plain, graphs = twins("qwen3", "lora")
    assert_same(train(model, RAGGED[:4]), train(plain, RAGGED[:4], pad_to=(*map(sum, RAGGED[:2]), 64)))
    for lengths in RAGGED[4:8]:
        (bucket,) = graphs.pack_buckets
        for memory in (*graphs._buffers.values(), *(held.memory for held in bucket._inputs)):
            memory.fill_(torch.nan if memory.is_floating_point() else -1)
        assert_same(train(model, [lengths]), train(plain, [lengths], pad_to=[64]))
    assert graphs.num_replays == 2 * 6


def test_frequent_packs_that_are_shorter_get_recordings_of_their_own():
    model, plain, graphs = twins("qwen3", "lora")
    packs = [*RAGGED, *[(9, 20, 4 + number % 4) for number in range(20)]]
    padded = [*map(sum, RAGGED[:2]), *[64] * 29, 40]
    assert_same(train(model, packs), train(plain, packs, pad_to=padded))
    assert sorted(bucket.size.num_tokens for bucket in graphs.pack_buckets) == [40, 64]
    assert graphs.num_recordings == 4


def test_an_input_of_another_shape_runs_as_ever():
    model, plain, graphs = twins("qwen3", "lora")
    for number in range(4):
        options = {"tag": torch.zeros(3 + number // 3)}
        assert_same(train(model, PACKS[:1], options=options), train(plain, PACKS[:1], options=options))
    assert graphs.reasons["tag changes from call to call"] == 2


def test_batches_without_a_context_and_autocast_run_as_ever():
    model, _, graphs = twins("qwen3", "lora")
    ids = torch.arange(3, 12)[None]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    with torch.autocast("cpu"):
        model(**make_batch(PACKS[0])).loss.backward()
    assert graphs.num_replays == 0
    assert set(graphs.reasons) == {"batches are not packed", "autocast"}
    assert graphs.status().state == "inactive"


def test_attention_that_is_not_recorded_is_named():
    model = build("qwen3", "lora")
    patcher = ModelPatcher()
    fuse(model)
    install_packed_training(model, patcher)
    graphs = LayerGraphs(layers_of(model), memory_of=shared_memory, recorder=Repeating())
    graphs.install(patcher)
    train(model)
    assert graphs.num_replays == 0
    assert any("attention by sdpa" in reason for reason in graphs.reasons)


def test_auto_is_recorded_when_its_plan_stands():
    model = build("qwen3", "lora")
    patcher, recorder = ModelPatcher(), Repeating()
    fuse(model)
    install_packed_training(
        model, patcher, checkpointing=OffloadCheckpointing("auto", vram_budget=1.0, host_budget=0.0)
    )
    graphs = LayerGraphs(layers_of(model), memory_of=shared_memory, recorder=recorder, backends=CPU)
    graphs.install(patcher)
    plain = build("qwen3", "lora")
    fuse(plain)
    install_packed_training(plain, ModelPatcher())
    same = [PACKS[0]] * 9
    assert_same(train(model, same), train(plain, same))
    assert graphs.num_replays > 0
    assert graphs.reasons["the first steps are still measured for the plan"] >= 6


def test_on_a_cpu_the_status_says_that_there_are_no_graphs():
    model = build("qwen3", "lora")
    fuse(model)
    install_packed_training(model, ModelPatcher())
    patcher = ModelPatcher()
    (graphs,) = install_layer_graphs(model, patcher)
    # The table of a run is made before its first step.
    assert (graphs.status().state, graphs.status().reason) == ("inactive", "CUDA graphs do not exist on cpu")
    train(model)
    assert graphs.status().state == "inactive"
    assert graphs.status().reason == "CUDA graphs do not exist on cpu"
    patcher.undo()
    assert all(GRAPH_ATTRIBUTE not in vars(layer) for layer in layers_of(model))
    assert graphs.status().reason == "CUDA graphs do not exist on cpu"


@pytest.mark.usefixtures("unprepared_models")
def test_everything_is_taken_back_and_copies_have_no_graphs():
    model = build("qwen3", "lora")
    plain = copy.deepcopy(model)
    graphs, patcher = install(model)
    train(model)
    assert graphs.num_replays > 0
    copied = copy.deepcopy(model)
    assert vars(layers_of(copied)[0])[GRAPH_ATTRIBUTE] is None
    assert pickle.loads(pickle.dumps(graphs._graphs[0])) is None
    held = [weakref.ref(recording) for kind in graphs.pack_buckets for recording in kind.recordings.values()]
    held += [weakref.ref(buffer) for buffer in graphs._buffers.values()]
    patcher.undo()
    gc.collect()
    assert len(held) > 4
    assert all(reference() is None for reference in held)
    assert all(GRAPH_ATTRIBUTE not in vars(layer) for layer in layers_of(model))
    assert graphs.status().state == "active"
    train(plain)
    before = graphs.num_replays
    train(model)
    assert graphs.num_replays == before


def test_memory_that_layers_share_is_held_for_the_graphs():
    model = build("qwen3", "lora")
    graphs, _ = install(model)
    train(model)
    recordings = [recording for kind in graphs.pack_buckets for recording in kind.recordings.values()]
    # By the forward and by the backward.
    assert [len(recording.held) for recording in recordings] == [2, 2]
    assert all(recording.held[0] is next(recording.layer.mlp.parameters()) for recording in recordings)


def test_a_context_that_is_loaded_describes_the_other_pack():
    first, second = make_batch((7, 1, 12, 12)).context, make_batch((16, 16)).context
    context = first.recordable(num_documents=6, max_length=16)
    assert context.start_S1.tolist() == [0, 7, 8, 20, 32, 32, 32]
    address = context.start_S1.data_ptr()
    context.load(second)
    assert context.start_S1.tolist() == [0, 16, 32, 32, 32, 32, 32]
    assert context.start_S1.data_ptr() == address
    assert context.varlen().max_length == 16
    assert torch.equal(context.dense_mask(), second.dense_mask())
    with pytest.raises(ShapeError, match="longest document"):
        context.load(make_batch((32,)).context)
    # The tokens of a shorter pack, and documents behind them that are no longer than the longest one may be.
    shorter, padded = make_batch((9, 5)).context, make_batch((9, 5, 16, 2)).context
    context.load(shorter)
    assert context.start_S1.tolist() == [0, 9, 14, 30, 32, 32, 32]
    for name in ("document_T", "position_T"):
        assert torch.equal(getattr(context, name), getattr(padded, name))
    assert torch.equal(context.dense_mask(), padded.dense_mask())
    with pytest.raises(ShapeError, match="6 documents in all"):
        context.load(make_batch((1,) * 6).context)
    longer = first.recordable(num_documents=6, max_length=16, num_tokens=48)
    assert longer.start_S1.tolist() == [0, 7, 8, 20, 32, 48, 48]
    assert first.start_S1.tolist() == [0, 7, 8, 20, 32]
