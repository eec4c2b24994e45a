"""Every plan gives the gradients of the kept model, bit by bit, with copies that run as late as their order allows."""

import pytest
import torch
from torch import nn

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.activations.segments import RECOMPUTE
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.core.run_environment import RunEnvironment
from lightning_fastft.fused.functions import feed_forward, projections
from lightning_fastft.moe import expert_linears as experts
from lightning_fastft.moe.install import install_bincount_router
from lightning_fastft.patches.packed import install_packed_training
from lightning_fastft.planner.step import SegmentPlan
from tests.planner.plan_trials import PlannedModel, assert_equal, kept_gradients, random_plan, read_gradients
from tests.support.late_streams import LateStreams
from tests.support.layer_pairs import DENSE, build, count_own_forwards, form_of, fuse, layers_of
from tests.support.packs import assert_close, make_batch
from tests.support.tiny_models import build_tiny

CLEAN = {"num_kept": 0, "num_unplanned": 0, "num_replaced": 0, "pinned_used_bytes": 0}
LENGTHS = (40, 1, 25, 30)


def make_model(name, **options):
    model = build_tiny(name.removesuffix(" routed"), **options).train()
    if name.endswith(" routed"):
        install_bincount_router(model, ModelPatcher())
    return model, [make_batch(LENGTHS, seed=seed) for seed in range(3)]


def late(seed=None):
    return lambda device: LateStreams(seed=seed)


def all_on_host(value_names):
    return [
        SegmentPlan(is_kept=False, input_place="host", values=tuple((name, "host") for name in names))
        for names in value_names
    ]


def is_clean(use):
    return use is None or {key: use[key] for key in CLEAN} == CLEAN


# Of the mixture one half with transformers' experts, the other with ours.
LONG_SEEDS = {
    "llama": range(4, 50),
    "gemma2": range(4, 50),
    "qwen3_moe": range(3, 25),
    "qwen3_moe routed": range(28, 50),
}


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        ("llama", range(4)),
        ("gemma2", range(4)),
        ("qwen3_moe", range(3)),
        ("qwen3_moe routed", range(25, 28)),
        *(pytest.param(name, seeds, marks=pytest.mark.fault) for name, seeds in LONG_SEEDS.items()),
    ],
)
def test_random_plans_are_bit_equal(name, seeds):
    model, batches = make_model(name, **({} if name == "gemma2" else {"num_hidden_layers": 4}))
    expected = {count: kept_gradients(model, batches, count) for count in (1, 3)}
    for count in (1, 3):
        assert_equal(
            kept_gradients(model, batches, count, policy="torch"), expected[count], what=f"{name}: torch's checkpoint"
        )
    planned = PlannedModel(model, batches, make_copy_streams=late(seed=1))
    assert ("mlp.experts.gate_up" in planned.value_names[0]) == name.endswith(" routed")
    for seed in seeds:
        planned.follow(random_plan(planned.value_names, seed=seed))
        for count in (1, 3):
            assert_equal(planned.gradients(count), expected[count], what=f"{name}, plan {seed}, accumulation {count}")
        assert is_clean(planned.use()), planned.use()


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_any_number_of_buffers_and_the_latest_copies(buffers):
    model, batches = make_model("llama", num_hidden_layers=5)
    expected = kept_gradients(model, batches, 3)
    planned = PlannedModel(model, batches, make_copy_streams=late(), buffers=buffers)
    planned.follow(all_on_host(planned.value_names))
    assert len(planned.stack.engine.slots) == buffers
    assert_equal(planned.gradients(3), expected, what=f"{buffers} buffers")
    assert is_clean(planned.use())


def test_a_wait_that_is_missing_is_seen():
    class Careless(LateStreams):
        def wait_compute(self, mark):
            """Wait for nothing."""

    model, batches = make_model("llama", num_hidden_layers=4)
    expected = kept_gradients(model, batches, 1)
    planned = PlannedModel(model, batches, make_copy_streams=lambda device: Careless())
    planned.follow(all_on_host(planned.value_names))
    found = planned.gradients(1)
    assert any(not torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_two_models_in_one_process_and_interleaved_backwards():
    """Both forwards, then both backwards in the order of the forwards: the order that an engine of stacks would
    get wrong.
    """
    models = [make_model("llama", num_hidden_layers=3)[0], make_model("qwen3", num_hidden_layers=3)[0]]
    batch = make_batch(LENGTHS)
    expected = [kept_gradients(model, [batch], 1) for model in models]
    planned = [PlannedModel(model, [batch], make_copy_streams=late(seed=number)) for number, model in enumerate(models)]
    for plan in planned:
        plan.follow(all_on_host(plan.value_names))
        plan.model.zero_grad(set_to_none=True)
    losses = [plan.model(**batch).loss for plan in planned]
    for loss in losses:
        loss.backward()
    for plan, wanted in zip(planned, expected):
        assert_equal(read_gradients(plan.model), wanted, what="interleaved")


def test_two_forwards_of_one_model_before_their_backwards():
    model, batches = make_model("llama", num_hidden_layers=3)
    expected = kept_gradients(model, batches, 2)
    planned = PlannedModel(model, batches, make_copy_streams=late(seed=2))
    planned.follow(all_on_host(planned.value_names))
    model.zero_grad(set_to_none=True)
    losses = [model(**batch).loss for batch in batches[:2]]
    for loss in losses:
        loss.backward()
    assert_equal(read_gradients(model), expected, what="two forwards")
    # The slab holds one forward; what did not fit stayed on the device, and nothing is left behind.
    assert planned.use()["num_kept"] > 0
    assert planned.use()["pinned_used_bytes"] == 0
    assert_equal(planned.gradients(2), expected, what="and then as usual")


def test_a_retained_graph_can_be_used_twice():
    model, batches = make_model("llama", num_hidden_layers=3)
    expected = kept_gradients(model, batches, 1)
    planned = PlannedModel(model, batches, make_copy_streams=late(seed=3))
    planned.follow(all_on_host(planned.value_names))
    model.zero_grad(set_to_none=True)
    loss = model(**batches[0]).loss
    loss.backward(retain_graph=True)
    assert_equal(read_gradients(model), expected, what="first")
    model.zero_grad(set_to_none=True)
    loss.backward()
    assert_equal(read_gradients(model), expected, what="second")
    del loss
    assert planned.use()["pinned_used_bytes"] == 0


@pytest.mark.parametrize("where", ["forward", "backward", "dropped graph"])
def test_an_interrupted_step_leaves_a_clean_next_one(where):
    model, batches = make_model("llama", num_hidden_layers=4)
    expected = kept_gradients(model, batches, 1)
    planned = PlannedModel(model, batches, make_copy_streams=late(seed=4))
    planned.follow(all_on_host(planned.value_names))

    def fail(*_):
        raise RuntimeError("planted")

    layer = model.model.layers[1].mlp
    if where == "dropped graph":
        model(**batches[0])
    else:
        handle = (
            layer.register_forward_hook(fail) if where == "forward" else layer.register_full_backward_pre_hook(fail)
        )
        with pytest.raises(RuntimeError, match="planted"):
            planned.gradients(1)
        handle.remove()
    assert_equal(planned.gradients(1), expected, what=where)
    assert is_clean(planned.use())


def test_evaluation_and_no_grad_take_no_slot():
    model, batches = make_model("llama", num_hidden_layers=3)
    planned = PlannedModel(model, batches, make_copy_streams=late())
    planned.follow(all_on_host(planned.value_names))
    copies = planned.stack.engine.streams.num_copies
    with torch.no_grad():
        model(**batches[0])
    model.eval()
    model(**batches[0]).loss.backward()
    model.train()
    assert planned.stack.engine.streams.num_copies == copies


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        ("device", r"gate_proj was kept for the backward and then written to"),
        ("host", "written to in place while it was copied"),
    ],
)
def test_writing_to_a_held_value_in_place_is_an_error_not_a_wrong_gradient(place, fault):
    class Spoiled(nn.Module):
        def forward(self, x):
            return nn.functional.silu(x.add_(1.0))

    model, batches = make_model("llama", num_hidden_layers=2)
    planned = PlannedModel(model, batches)
    planned.follow([RECOMPUTE._replace(values=tuple((name, place) for name in names)) for names in planned.value_names])
    model.model.layers[0].mlp.act_fn = Spoiled()
    with pytest.raises(RuntimeError, match=fault):
        planned.gradients(1)


def test_gradient_of_the_router_arrives_with_the_auxiliary_loss():
    model, batches = make_model("qwen3_moe", num_hidden_layers=2)
    model.config.output_router_logits = True
    model.config.router_aux_loss_coef = model.router_aux_loss_coef = 0.5
    expected = kept_gradients(model, batches, 1)
    planned = PlannedModel(model, batches, make_copy_streams=late())
    planned.follow(all_on_host(planned.value_names))
    found = planned.gradients(1)
    assert found["model.layers.0.mlp.gate.weight"].abs().sum() > 0
    assert_equal(found, expected, what="auxiliary loss")


def test_the_second_run_of_routed_experts_leaves_out_what_nobody_needs(monkeypatch):
    """With the first product held: no gather, no product; without: the first one alone."""
    model, batches = make_model("qwen3_moe routed", num_hidden_layers=2)
    expected = kept_gradients(model, batches, 1)
    planned = PlannedModel(model, batches)
    products = []
    real = experts.grouped_mm
    monkeypatch.setattr(
        experts, "grouped_mm", lambda *args, **options: products.append(args[1].shape[-1]) or real(*args, **options)
    )
    counts = {}
    for place, values in (("recomputed", ()), ("held", (("mlp.experts.gate_up", "device"),))):
        planned.follow([RECOMPUTE._replace(values=values)] * 2)
        products.clear()
        assert_equal(planned.gradients(1), expected, what=place)
        counts[place] = len(products)
    # Two products forward and two backward in each of two layers, and the first one again.
    assert counts == {"recomputed": 10, "held": 8}


def test_the_choice_of_experts_is_kept_not_made_again():
    """Noise between the two runs, as other kernels would add: the same experts all the same."""
    model, batches = make_model("qwen3_moe", num_hidden_layers=1)
    patcher = ModelPatcher()
    install_packed_training(model, patcher, checkpointing=OffloadCheckpointing("recompute"))
    chosen = []
    gate = model.model.layers[0].mlp.gate
    gate.register_forward_hook(
        lambda module, args, output: chosen.append(output[2] if isinstance(output, tuple) else None)
    )
    gate.register_forward_pre_hook(lambda module, args: (args[0] + 0.5 * torch.randn_like(args[0]),))
    model(**batches[0]).loss.backward()
    first, second = chosen
    assert torch.equal(first, second)


def test_plain_modules_without_transformers_attributes():
    layers = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)]
    x = torch.randn(300, 16)

    def gradients():
        hidden = x
        for layer in layers:
            hidden = layer(hidden)
        hidden.square().mean().backward()
        found = {
            f"{number}.{name}": parameter.grad
            for number, layer in enumerate(layers)
            for name, parameter in layer.named_parameters()
        }
        for layer in layers:
            layer.zero_grad(set_to_none=True)
        return found

    expected = gradients()
    checkpointing, patcher = OffloadCheckpointing("offload"), ModelPatcher()
    checkpointing.attach(layers, patcher)
    checkpointing.stacks[0].executor.make_copy_streams = late()
    assert_equal(gradients(), expected, what="plain modules")
    assert checkpointing.stacks[0].engine.streams.num_copies == 2 * 3
    patcher.undo()
    assert all("forward" not in vars(layer) for layer in layers)
    assert_equal(gradients(), expected, what="undone")


def test_packs_that_grow_are_planned_again():
    model, _ = make_model("llama", num_hidden_layers=3)
    small, large = make_batch((10, 12)), make_batch(LENGTHS)
    reports = []
    expected = kept_gradients(model, [large], 1)
    planned = PlannedModel(model, [small])
    planned.stack.environment = planned.stack.environment._replace(report=reports.append)
    planned.batches = [large]
    for _ in range(4):
        assert_equal(planned.gradients(1), expected, what="grown")
    assert any("packs grew" in report for report in reports)
    assert planned.stack.plan is not None


def test_a_slab_too_small_for_all_inputs_takes_some_and_says_so():
    model, batches = make_model("llama", num_hidden_layers=4)
    expected = kept_gradients(model, batches, 1)
    input_bytes = batches[0]["input_ids"].numel() * 32 * 4
    checkpointing = OffloadCheckpointing("offload", host_budget=1.5 * input_bytes / 2**30)
    reports = []
    install_packed_training(
        model, ModelPatcher(), checkpointing=checkpointing, environment=RunEnvironment(report=reports.append)
    )
    model(**batches[0]).loss.backward()
    assert_equal(read_gradients(model), expected, what="small slab")
    assert "1 of 3 inputs" in reports[0]
    assert "1 of 3 inputs" in checkpointing.status().reason


FUSED = ("self_attn.qkv", "self_attn.o_proj")


def make_fused(name, **options):
    """A small model of one of the families of the decoder tests, its layers fused."""
    model = build(name.removesuffix(" routed"), "lora" if name == "llama biased" else "full", **options)
    if name.endswith(" routed"):
        install_bincount_router(model, ModelPatcher())
    fuse(model)
    return model, [make_batch(LENGTHS, seed=seed) for seed in range(3)]


@pytest.mark.parametrize(
    ("name", "seeds", "num_layers"),
    [
        *((name, range(4), 4) for name in ("llama biased", "qwen3", "qwen3_moe routed")),
        *((name, range(3), 2) for name in ("gpt_oss", "gemma3")),
        *((name, range(2), 2) for name in ("granite", "olmo2", "lfm2")),
        *(
            pytest.param(name, range(3, 8), num_layers, marks=pytest.mark.fault)
            for name, num_layers in (
                ("llama biased", 4),
                ("qwen3", 4),
                ("qwen3_moe routed", 4),
                ("gpt_oss", 2),
                ("gemma3", 2),
            )
        ),
    ],
)
def test_random_plans_over_fused_layers_are_bit_equal(name, seeds, num_layers):
    model, batches = make_fused(name, num_hidden_layers=num_layers)
    expected = {count: kept_gradients(model, batches, count) for count in (1, 3)}
    planned = PlannedModel(model, batches, make_copy_streams=late(seed=1))
    with count_own_forwards(model) as own:
        planned.gradients(1)
    assert own.attention == 0
    block = ("mlp.gate_up",) if name in DENSE else ("mlp.experts.gate_up",) if name.endswith(" routed") else ()
    assert set(planned.value_names[-1]) == {*FUSED, *block, *(("mlp.down",) if form_of(model).post_norms else ())}
    for seed in seeds:
        planned.follow(random_plan(planned.value_names, seed=seed))
        for count in (1, 3):
            assert_equal(planned.gradients(count), expected[count], what=f"{name}, plan {seed}, accumulation {count}")
        assert is_clean(planned.use()), planned.use()


def test_what_a_fused_layer_holds_is_not_computed_again(monkeypatch):
    """Counted by the norms and products that run between forward and the end of the backward of one layer."""
    model, batches = make_fused("qwen3", num_hidden_layers=1)
    expected = kept_gradients(model, batches, 1)
    planned = PlannedModel(model, batches)
    columns = []
    real = projections.product

    def count(joint, *args, **options):
        columns.append(sum(part.num_outputs for part in joint.parts))
        return real(joint, *args, **options)

    for module in (projections, feed_forward):
        monkeypatch.setattr(module, "product", count)
    qkv, out, gate_up, down = 128, 32, 80, 32
    forward = [qkv, out, gate_up, down]
    # The last product of a layer is needed by nobody in its second run.
    again = {
        (): [qkv, out, gate_up],
        ("self_attn.qkv",): [out, gate_up],
        ("mlp.gate_up", "self_attn.o_proj"): [qkv],
        (*FUSED, "mlp.gate_up"): [],
    }
    for names, second in again.items():
        for place in ("device", "host"):
            planned.follow([RECOMPUTE._replace(values=tuple((name, place) for name in names))])
            planned.gradients(1)
            columns.clear()
            assert_equal(planned.gradients(1), expected, what=f"{names} on {place}")
            assert columns == forward + second


def test_a_last_product_that_a_norm_reads_is_held_like_the_others(monkeypatch):
    model, batches = make_fused("gemma3", num_hidden_layers=1, layer_types=["sliding_attention"])
    expected = kept_gradients(model, batches, 1)
    planned = PlannedModel(model, batches)
    runs = []
    real = projections.product
    for module in (projections, feed_forward):
        monkeypatch.setattr(
            module, "product", lambda *args, **options: runs.append("product") or real(*args, **options)
        )
    gate = feed_forward.gate_forward
    monkeypatch.setattr(
        feed_forward, "gate_forward", lambda *args, **options: runs.append("gate") or gate(*args, **options)
    )
    for names, num_products, num_gates in [
        ((), 8, 2),
        (("mlp.down",), 7, 1),
        (("mlp.gate_up",), 7, 2),
        ((*FUSED, "mlp.gate_up", "mlp.down"), 4, 1),
    ]:
        for place in ("device", "host"):
            planned.follow([RECOMPUTE._replace(values=tuple((name, place) for name in names))])
            planned.gradients(1)
            runs.clear()
            assert_equal(planned.gradients(1), expected, what=f"{names} on {place}")
            assert (runs.count("product"), runs.count("gate")) == (num_products, num_gates), names


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_a_last_product_of_a_fused_layer_that_is_needed_after_all_is_computed(name):
    model, batches = make_fused(name, num_hidden_layers=2)
    expected = kept_gradients(model, batches, 1)
    checkpointing = OffloadCheckpointing("recompute")
    install_packed_training(model, ModelPatcher(), checkpointing=checkpointing)
    layers = layers_of(model)

    class Squared(type(layers[0])):
        """A layer that reads its output again after its last Function."""

        def forward(self, *args, **options):
            out = super().forward(*args, **options)
            return out if not torch.is_grad_enabled() else out + 0.0 * out.square()

    for segment in checkpointing.last_segments():
        segment.last_point = "mlp.post_norm" if form_of(model).post_norms else "mlp.down"
    for layer in layers:
        layer.__class__ = Squared
    model(**batches[0]).loss.backward()
    assert_equal(read_gradients(model), expected, what="after a wrong guess")


def check_tiled_step(model, batch, expected, *, num_blocks):
    """Check the gradients of a step, and how often a block has run as a module; None for any number."""
    model.zero_grad(set_to_none=True)
    with count_own_forwards(model) as own:
        model(**batch).loss.backward()
    assert own.attention == 0
    assert own.block == num_blocks or num_blocks is None
    found = read_gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(found[name], gradient)


@pytest.mark.parametrize(("name", "num_layers"), [("qwen3", 3), ("gemma3", 2)])
def test_tiles_of_the_block_and_fused_attention_go_together(name, num_layers):
    model, batches = make_fused(name, num_hidden_layers=num_layers)
    expected = kept_gradients(model, batches, 1)
    for policy in ("recompute", "offload"):
        patcher = ModelPatcher()
        install_packed_training(model, patcher, checkpointing=OffloadCheckpointing(policy, mlp_tiles=3))
        # The first second run learns where it ends; after that, three tiles of three blocks run in the forward and once
        # more before their backward.
        for num_blocks in (None, 18):
            check_tiled_step(model, batches[0], expected, num_blocks=num_blocks)
        patcher.undo()


def test_fused_blocks_run_as_modules_once_tiles_are_added():
    model, batches = make_fused("qwen3", num_hidden_layers=3)
    expected = kept_gradients(model, batches, 1)
    checkpointing = OffloadCheckpointing("auto", vram_budget=1000, host_budget=0, weights="resident")
    install_packed_training(model, ModelPatcher(), checkpointing=checkpointing)
    # The second run of a block in tiles learns where it ends; after that, eight tiles of three blocks run in the forward
    # and once more before their backward.
    for num_blocks, is_last in ((0, False), (0, False), (None, True), (48, True)):
        check_tiled_step(model, batches[0], expected, num_blocks=num_blocks)
        assert is_last or checkpointing.step_down()


@pytest.mark.parametrize("is_early", [True, False])
def test_streamed_weights_under_fused_layers_give_the_same_bits(is_early):
    """Also from the first step on when streaming is decided within it: inside the call of the first layer, whose
    hooks are passed by then.
    """
    model, batches = make_fused("llama biased", num_hidden_layers=4)
    expected = {count: kept_gradients(model, batches, count) for count in (1, 3)}
    checkpointing = OffloadCheckpointing("recompute", weights="stream", host_budget=1.0)
    patcher, before = ModelPatcher(), {name: value.clone() for name, value in model.state_dict().items()}
    install_packed_training(model, patcher, checkpointing=checkpointing)
    checkpointing.stacks[0].executor.make_copy_streams = late(seed=5 if is_early else None)
    if is_early:
        checkpointing.place(torch.device("cpu"))
    for count in (1, 3, 3):
        model.zero_grad(set_to_none=True)
        for batch in batches[:count]:
            with count_own_forwards(model) as own:
                model(**batch).loss.backward()
            assert own.attention == 0
        assert_equal(read_gradients(model), expected[count], what=f"streamed, accumulation {count}")
    assert checkpointing.stacks[0].weights.streamed is not None
    patcher.undo()
    assert_equal(model.state_dict(), before, what="given back")
