"""Offloaded layers beside everything else that a model, a user or a Trainer does: the bits of the kept model, and
a clean next step.
"""

import copy
import functools
import gc
import logging

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.activations.engine import OffloadEngine
from lightning_fastft.activations.segments import RECOMPUTE
from lightning_fastft.activations.stack import SegmentStack
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.patches.packed import install_packed_training
from lightning_fastft.strategies.registry import register_strategies
from lightning_fastft.strategies.single_device import FastFTStrategy
from tests.planner.plan_trials import PlannedModel, assert_equal, kept_gradients, random_plan, read_gradients
from tests.support.engine_use import describe_use
from tests.support.late_streams import LateStreams
from tests.support.packs import make_batch
from tests.support.tiny_models import build_tiny
from tests.support.training_parts import PlainModule, packed_loader, quiet_trainer, tiny_llama

pytestmark = pytest.mark.covering

LENGTHS = (40, 1, 25, 30)
IDS = torch.randint(3, 90, (1, 96), generator=torch.Generator().manual_seed(0))
# Without a context: attention with dropout exists only there.
PLAIN_BATCH = {"input_ids": IDS, "labels": IDS, "use_cache": False}

register_strategies()


def llama(**options):
    return build_tiny("llama", **{"num_hidden_layers": 3, **options}).train()


def late(seed=1):
    return lambda device: LateStreams(seed=seed)


def all_on_host(value_names):
    return [
        RECOMPUTE._replace(input_place="host", values=tuple((name, "host") for name in names)) for names in value_names
    ]


def offloading(model, **options):
    """A model under "offload" with late copies."""
    checkpointing, patcher = OffloadCheckpointing("offload", **options), ModelPatcher()
    install_packed_training(model, patcher, checkpointing=checkpointing)
    checkpointing.stacks[0].executor.make_copy_streams = late()
    return checkpointing.stacks[0], patcher


def seeded_gradients(model, batch, *, seed=3):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    model(**batch).loss.backward()
    return read_gradients(model)


class TestCompile:
    """A compiled layer, or a compiled part of one, inside the checkpoint."""

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    @pytest.mark.parametrize("form", ["layer", "forward", "part"])
    def test_compiled_layers_have_the_gradients_of_plain_ones(self, form, backend):
        model, batch = llama(num_hidden_layers=2), make_batch(LENGTHS)
        expected = kept_gradients(model, [batch], 1)
        torch._dynamo.reset()
        for layer in model.model.layers:
            if form == "layer":
                layer.compile(backend=backend)
            elif form == "forward":
                layer.forward = functools.partial(torch.compile(type(layer).forward, backend=backend), layer)
            else:
                layer.mlp.compile(backend=backend)
        stack, _ = offloading(model)
        for number in range(2):
            assert_equal(seeded_gradients(model, batch), expected, what=f"{form}, {backend}, step {number}")
        assert stack.engine.streams.num_copies == 2 * 2
        assert describe_use(stack.engine)["num_unplanned"] == 0

    def test_a_compiled_part_is_really_compiled(self):
        model, batch = llama(num_hidden_layers=2), make_batch(LENGTHS)
        num_graphs = []

        def backend(graph, inputs):
            num_graphs.append(len(list(graph.graph.nodes)))
            return graph.forward

        torch._dynamo.reset()
        for layer in model.model.layers:
            layer.mlp.compile(backend=backend)
        offloading(model)
        seeded_gradients(model, batch)
        assert num_graphs
        assert min(num_graphs) > 5

    def test_a_compiled_part_takes_nothing_from_the_plan_and_disturbs_no_other_value(self):
        model, batch = llama(), make_batch(LENGTHS)
        expected = kept_gradients(model, [batch], 1)
        torch._dynamo.reset()
        model.model.layers[1].mlp.compile(backend="aot_eager")
        planned = PlannedModel(model, [batch], make_copy_streams=late())
        assert not any("mlp" in name for name in planned.value_names[1])
        assert any("mlp" in name for name in planned.value_names[0])
        for seed in range(5):
            planned.follow(random_plan(planned.value_names, seed=seed))
            assert_equal(planned.gradients(1), expected, what=f"plan {seed}")


class HasOddRate(nn.Module):
    """Dropout as a function, its rate under another name."""

    def __init__(self):
        super().__init__()
        self.drop_prob = 0.5

    def forward(self, x):
        return nn.functional.dropout(nn.functional.silu(x), self.drop_prob, training=self.training)


@pytest.mark.parametrize("where", ["attention", "module", "both", "function"])
def test_dropout_is_the_same_in_the_second_run_under_any_plan(where):
    model = llama(attention_dropout=0.5 if where in ("attention", "both") else 0.0)
    for layer in model.model.layers:
        if where == "function":
            layer.mlp.act_fn = HasOddRate()
        elif where != "attention":
            layer.mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.5))
    kept = copy.deepcopy(model)
    install_packed_training(kept, ModelPatcher(), checkpointing=OffloadCheckpointing("keep"))
    expected = seeded_gradients(kept, PLAIN_BATCH)
    assert any(
        not torch.equal(expected[name], other) for name, other in seeded_gradients(kept, PLAIN_BATCH, seed=4).items()
    )
    planned = PlannedModel(model, [PLAIN_BATCH], make_copy_streams=late())
    for seed in range(10):
        planned.follow(random_plan(planned.value_names, seed=seed))
        assert_equal(seeded_gradients(model, PLAIN_BATCH), expected, what=f"{where}, plan {seed}")


def test_random_numbers_after_a_step_are_those_of_the_kept_model():
    """The second run draws its numbers again and gives the state back."""
    after = []
    for policy in ("keep", "offload"):
        model = llama(attention_dropout=0.5)
        install_packed_training(model, ModelPatcher(), checkpointing=OffloadCheckpointing(policy))
        seeded_gradients(model, PLAIN_BATCH)
        after.append(torch.rand(3))
    assert torch.equal(*after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(dtype):
    model, batches = llama().to(dtype), [make_batch(LENGTHS, seed=seed) for seed in range(2)]
    expected = kept_gradients(model, batches, 2)
    assert {gradient.dtype for gradient in expected.values()} == {dtype}
    planned = PlannedModel(model, batches, make_copy_streams=late())
    for seed in range(5):
        planned.follow(random_plan(planned.value_names, seed=seed))
        assert_equal(planned.gradients(2), expected, what=f"{dtype}, plan {seed}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_reaches_the_second_run(dtype):
    model, batch = llama(), make_batch(LENGTHS)
    found = []
    for policy in ("keep", "offload"):
        twin = copy.deepcopy(model)
        install_packed_training(twin, ModelPatcher(), checkpointing=OffloadCheckpointing(policy))
        with torch.autocast("cpu", dtype=dtype):
            loss = twin(**batch).loss
        loss.backward()
        found.append(read_gradients(twin))
    assert_equal(found[1], found[0], what=f"autocast to {dtype}")


class Odd(nn.Module):
    """A layer that is given a view and gives several things back."""

    def __init__(self, width, *, form):
        super().__init__()
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.form = form

    def forward(self, x, *, scale=None):
        out = x + self.second(torch.sigmoid(self.first(x))) * (1.0 if scale is None else scale)
        return {"tensor": out, "tuple": (out, out.detach().mean()), "list": [out, None]}[self.form]


VIEWS = {
    "transposed": lambda x: x.t().contiguous().t(),
    "with gaps": lambda x: torch.stack([x, x + 1], dim=-1)[..., 0],
    "part of a larger one": lambda x: torch.cat([x, x])[: x.shape[0]],
    "expanded": lambda x: x.mean(0, keepdim=True).expand(x.shape[0], x.shape[1]),
    "reversed strides": lambda x: x.reshape(4, -1, x.shape[1]).transpose(0, 1).reshape(-1, x.shape[1]),
}


@pytest.mark.parametrize("form", ["tensor", "tuple", "list"])
@pytest.mark.parametrize("view", VIEWS)
def test_layers_of_anybody_take_views_and_give_tuples(view, form):
    layers = nn.ModuleList([Odd(16, form=form) for _ in range(4)])
    x, scale = torch.randn(300, 16, requires_grad=True), torch.randn(300, 1)

    def gradients():
        layers.zero_grad(set_to_none=True)
        x.grad = None
        hidden = x * 1
        for layer in layers:
            out = layer(VIEWS[view](hidden), scale=scale)
            hidden = out if torch.is_tensor(out) else out[0]
        hidden.square().mean().backward()
        return {**read_gradients(layers), "x": x.grad.clone()}

    expected = gradients()
    checkpointing = OffloadCheckpointing("offload")
    checkpointing.attach(list(layers), ModelPatcher())
    checkpointing.stacks[0].executor.make_copy_streams = late()
    for _ in range(2):
        assert_equal(gradients(), expected, what=view)
    assert (checkpointing.stacks[0].engine.num_kept > 0) is (view in ("with gaps", "expanded"))


def test_a_layer_that_is_given_everything_by_name():
    layers = nn.ModuleList([nn.Bilinear(8, 8, 8) for _ in range(3)])

    def gradients():
        layers.zero_grad(set_to_none=True)
        hidden = torch.ones(50, 8)
        for layer in layers:
            hidden = layer(input1=hidden, input2=hidden)
        hidden.sum().backward()
        return read_gradients(layers)

    expected = gradients()
    OffloadCheckpointing("offload").attach(list(layers), ModelPatcher())
    assert_equal(gradients(), expected, what="by name")


def test_what_a_user_keeps_of_the_second_run_stays_right(caplog):
    """A hook inside a layer sees the staged input; kept beyond the backward it is the user's, and the slot gets
    other memory.
    """
    model, batch = llama(num_hidden_layers=4), make_batch(LENGTHS)
    expected = kept_gradients(model, [batch], 1)
    stack, _ = offloading(model)
    seen = [[] for _ in model.model.layers]
    for layer, tensors in zip(model.model.layers, seen):
        layer.input_layernorm.register_forward_pre_hook(
            lambda module, args, tensors=tensors: tensors.append(args[0].detach())
        )
    with caplog.at_level(logging.WARNING, logger="lightning_fastft.activations.slots"):
        for number in range(3):
            assert_equal(seeded_gradients(model, batch), expected, what=f"step {number}")
    for number, tensors in enumerate(seen):
        assert len(tensors) == 6
        assert all(torch.equal(tensor, tensors[0]) for tensor in tensors), f"layer {number}"
    assert describe_use(stack.engine)["num_replaced"] > 0
    assert "outlived the backward" in caplog.text


def test_flags_of_transformers_come_back():
    model = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    before = [
        {name: value for name, value in vars(module).items() if "checkpointing" in name} for module in model.modules()
    ]
    _, patcher = offloading(model)
    seeded_gradients(model, make_batch(LENGTHS))
    patcher.undo()
    assert [
        {name: value for name, value in vars(module).items() if "checkpointing" in name} for module in model.modules()
    ] == before
    model.gradient_checkpointing_disable()
    _, patcher = offloading(model)
    assert model.is_gradient_checkpointing
    patcher.undo()
    assert not model.is_gradient_checkpointing


def test_trained_copies_of_peft():
    """modules_to_save inside and outside of the layers."""
    model = get_peft_model(
        llama(),
        LoraConfig(
            r=4, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head", "o_proj"], lora_dropout=0.2
        ),
    )
    batch = make_batch(LENGTHS)
    kept = copy.deepcopy(model)
    install_packed_training(kept, ModelPatcher(), checkpointing=OffloadCheckpointing("keep"))
    expected = seeded_gradients(kept, batch)
    assert {"lm_head", "o_proj"} <= {part for name in expected for part in name.split(".")}
    planned = PlannedModel(model, [batch], make_copy_streams=late())
    for seed in range(8):
        planned.follow(random_plan(planned.value_names, seed=seed))
        assert_equal(seeded_gradients(model, batch), expected, what=f"plan {seed}")


@pytest.mark.parametrize("trained", ["all", "adapters"])
@pytest.mark.parametrize("part", ["mlp", "self_attn"])
def test_a_checkpoint_inside_a_layer(part, trained):
    model, batch = llama(), make_batch(LENGTHS)
    if trained == "adapters":
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    expected = kept_gradients(model, [batch], 1)
    for layer in (model.base_model.model if trained == "adapters" else model).model.layers:
        module = getattr(layer, part)
        own = type(module).forward
        module.forward = lambda *args, own=own, module=module, **options: checkpoint(
            own, module, *args, use_reentrant=False, **options
        )
    planned = PlannedModel(model, [batch], make_copy_streams=late())
    for seed in range(10):
        planned.follow(random_plan(planned.value_names, seed=seed))
        assert_equal(planned.gradients(1), expected, what=f"plan {seed}")


@pytest.mark.parametrize("policy", ["offload", "recompute"])
def test_a_checkpoint_around_several_layers(policy):
    layers = nn.ModuleList([Odd(16, form="tensor") for _ in range(4)])
    x = torch.randn(300, 16)

    def gradients():
        layers.zero_grad(set_to_none=True)
        hidden = x
        for first, second in zip(layers[::2], layers[1::2]):
            hidden = checkpoint(
                lambda hidden, first=first, second=second: second(first(hidden)), hidden, use_reentrant=False
            )
        hidden.square().mean().backward()
        return read_gradients(layers)

    expected = gradients()
    checkpointing = OffloadCheckpointing(policy)
    checkpointing.attach(list(layers), ModelPatcher())
    checkpointing.stacks[0].executor.make_copy_streams = late()
    for _ in range(3):
        assert_equal(gradients(), expected, what=policy)
    if policy == "offload":
        assert describe_use(checkpointing.stacks[0].engine)["pinned_used_bytes"] == 0


@pytest.mark.parametrize("hooks", ["save_on_cpu", "own"])
def test_hooks_of_a_user_around_the_model(hooks):
    model, batch = llama(), make_batch(LENGTHS)
    expected = kept_gradients(model, [batch], 1)
    planned = PlannedModel(model, [batch], make_copy_streams=late())
    seen = []

    def around():
        if hooks == "save_on_cpu":
            return torch.autograd.graph.save_on_cpu()
        return torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: seen.append(True) or tensor.clone(), lambda tensor: tensor
        )

    for seed in range(5):
        planned.follow(random_plan(planned.value_names, seed=seed))
        model.zero_grad(set_to_none=True)
        with around():
            loss = model(**batch).loss
        loss.backward()
        assert_equal(read_gradients(model), expected, what=f"{hooks}, plan {seed}")
    assert bool(seen) is (hooks == "own")


def test_a_forward_without_gradients_between_forward_and_backward():
    model, batches = llama(), [make_batch(LENGTHS, seed=seed) for seed in range(2)]
    expected = kept_gradients(model, batches, 1)
    planned = PlannedModel(model, batches, make_copy_streams=late())
    planned.follow(all_on_host(planned.value_names))
    model.zero_grad(set_to_none=True)
    loss = model(**batches[0]).loss
    with torch.no_grad():
        # Longer than any pack so far, which matters in training alone.
        model(**make_batch((90, 90)))
    model.eval()
    with torch.inference_mode():
        model(**batches[1])
    model(**batches[1])
    model.train()
    loss.backward()
    assert_equal(read_gradients(model), expected, what="between")
    assert planned.stack.plan is not None
    assert (planned.use()["num_kept"], planned.use()["pinned_used_bytes"]) == (0, 0)


def test_an_evaluation_between_the_steps_of_a_window():
    model, batches = llama(), [make_batch(LENGTHS, seed=seed) for seed in range(3)]
    expected = kept_gradients(model, batches, 3)
    checkpointing = OffloadCheckpointing("auto", vram_budget=1000, host_budget=1)
    install_packed_training(model, ModelPatcher(), checkpointing=checkpointing)
    (stack,) = checkpointing.stacks
    stack.executor.make_copy_streams = late()
    for window in range(3):
        model.zero_grad(set_to_none=True)
        for batch in batches:
            model(**batch).loss.backward()
            model.eval()
            with torch.no_grad():
                model(**make_batch((90, 90)))
            model.train()
        assert_equal(read_gradients(model), expected, what=f"window {window}")
    assert stack.plan is not None
    assert stack.cost.segments[0].input_bytes == 96 * 32 * 4, "an evaluation is no reason to plan for its packs"


class FailingLanes(LateStreams):
    """CopyStreams whose n-th copy out or in is refused, as a device does that is in trouble."""

    def __init__(self):
        super().__init__(seed=1)
        self.fail_in = {}

    def copy_out(self, host, device, *, after):
        self._count("out")
        return super().copy_out(host, device, after=after)

    def copy_in(self, device, host, *, after):
        self._count("in")
        return super().copy_in(device, host, after=after)

    def _count(self, stream):
        if stream in self.fail_in:
            self.fail_in[stream] -= 1
            if self.fail_in[stream] == 0:
                raise RuntimeError("planted")


@pytest.mark.parametrize(
    ("stream", "nth"),
    [
        ("out", 1),
        ("in", 5),
        *(pytest.param(*case, marks=pytest.mark.fault) for case in (("out", 2), ("out", 5), ("in", 1), ("in", 2))),
    ],
)
def test_a_copy_that_fails_leaves_a_clean_next_step(stream, nth):
    model, batch = llama(), make_batch(LENGTHS)
    expected = kept_gradients(model, [batch], 1)
    planned = PlannedModel(model, [batch], make_copy_streams=lambda device: FailingLanes())
    planned.follow(all_on_host(planned.value_names))
    streams = planned.stack.engine.streams
    for _ in range(3):
        streams.fail_in = {stream: nth}
        with pytest.raises(RuntimeError, match="planted"):
            planned.gradients(1)
        streams.fail_in = {}
        assert_equal(planned.gradients(1), expected, what=f"{stream}, copy {nth}")
        gc.collect()
        use = planned.use()
        assert (use["num_kept"], use["num_unplanned"], use["pinned_used_bytes"]) == (0, 0, 0)


def living():
    """Engines and stacks that exist now, by identity."""
    gc.collect()
    # Not isinstance: it asks the lazy modules of libraries for what they are.
    return {id(item): item for item in gc.get_objects() if type(item) in (OffloadEngine, SegmentStack)}


def swapped_attributes(model):
    return [
        {name: value for name, value in vars(part).items() if "checkpointing" in name or "fastft" in name}
        for part in model.modules()
    ]


def loader(num_batches=8):
    return packed_loader(num_batches)


class Watch(Callback):
    """Notes what the plan was at each step."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        (stack,) = trainer.strategy.checkpointing.stacks
        self.seen.append(stack.plan is not None)


@pytest.mark.parametrize("policy", ["auto", "offload"])
def test_a_whole_run_has_the_weights_of_the_kept_one(tmp_path, policy):
    """Validation in between, saving, accumulation and clipping."""
    states, callbacks = [], {}
    for name in ("keep", policy):
        torch.manual_seed(0)
        module = PlainModule(tiny_llama())
        options = {"vram_budget": 100} if name == "auto" else {}
        strategy = FastFTStrategy(activations=OffloadCheckpointing(name, **options))
        watch = callbacks[name] = Watch()
        saved = ModelCheckpoint(dirpath=tmp_path / name, every_n_train_steps=2, save_top_k=-1, filename="{step}")
        trainer = quiet_trainer(
            tmp_path,
            strategy=strategy,
            max_steps=4,
            accumulate_grad_batches=2,
            gradient_clip_val=0.5,
            val_check_interval=2,
            enable_checkpointing=True,
            callbacks=[saved] if name == "keep" else [saved, watch],
        )
        trainer.fit(module, loader(), packed_loader(2, seed=50))
        assert trainer.global_step == 4
        assert "val_loss" in trainer.callback_metrics
        states.append(
            (module.state_dict(), torch.load(tmp_path / name / "step=4.ckpt", weights_only=True)["state_dict"])
        )
        reason = next(status.reason for status in trainer.strategy.statuses() if status.name == "activations")
    for kept, found in zip(*states):
        assert_equal(found, kept, what=policy)
    if policy == "auto":
        assert callbacks["auto"].seen[:4] == [False] * 3 + [True]
        assert reason.startswith("auto: ")
    else:
        assert "1 layer inputs" in reason


def test_the_table_says_what_is_in_effect_and_the_plan_is_logged(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr("lightning_fastft.strategies.packed_steps.rank_zero_info", lines.append)
    monkeypatch.setattr("lightning_fastft.strategies.mixin.rank_zero_info", lines.append)
    tables = []

    class Look(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            tables.append(next(status.reason for status in trainer.strategy.statuses() if status.name == "activations"))

    strategy = FastFTStrategy(activations=OffloadCheckpointing("auto", vram_budget=100))
    quiet_trainer(tmp_path, strategy=strategy, max_steps=5, callbacks=[Look()]).fit(PlainModule(tiny_llama()), loader())
    assert ["measured" in table for table in tables] == [True] * 3 + [False] * 2
    assert "predicted" in tables[-1]
    assert "the first steps recompute and are measured" in lines[0]
    assert any("layers" in line and "activations" in line for line in lines)


def test_the_table_of_a_cpu_says_that_everything_is_kept(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr("lightning_fastft.strategies.mixin.rank_zero_info", lines.append)
    quiet_trainer(tmp_path, strategy="fastft", max_steps=1).fit(PlainModule(tiny_llama()), loader())
    assert "on a CPU every activation is kept" in lines[0]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    ("policy", "at_step", "error"),
    [
        ("offload", 2, RuntimeError),
        ("offload", 2, KeyboardInterrupt),
        ("auto", 1, KeyboardInterrupt),
        ("auto", 2, RuntimeError),
        ("auto", 4, KeyboardInterrupt),
        pytest.param("auto", 1, RuntimeError, marks=pytest.mark.fault),
        pytest.param("auto", 2, KeyboardInterrupt, marks=pytest.mark.fault),
        pytest.param("auto", 4, RuntimeError, marks=pytest.mark.fault),
    ],
)
def test_nothing_is_left_after_an_exception(tmp_path, policy, at_step, error, where):
    class Fails(PlainModule):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if batch_idx == at_step and where == "forward":
                raise error("planted")
            return loss

        def on_after_backward(self):
            if self.trainer.global_step == at_step and where == "backward":
                raise error("planted")

    before_run = living()
    module = Fails(tiny_llama())
    before = swapped_attributes(module.model)
    checkpointing = OffloadCheckpointing(policy, **({"vram_budget": 100} if policy == "auto" else {}))
    trainer = quiet_trainer(tmp_path, strategy=FastFTStrategy(activations=checkpointing), max_steps=6)
    with pytest.raises((error, SystemExit)):
        trainer.fit(module, loader())
    assert checkpointing.stacks == []
    assert swapped_attributes(module.model) == before
    del trainer, checkpointing
    module.zero_grad(set_to_none=True)
    assert living().keys() <= before_run.keys()
    # And the module trains again.
    trainer = quiet_trainer(tmp_path, strategy="fastft", max_steps=1)
    trainer.fit(PlainModule(module.model), loader())
    assert trainer.global_step == 1


def test_nothing_is_left_after_a_run(tmp_path):
    before_run = living()
    strategy = FastFTStrategy(activations=OffloadCheckpointing("offload"))
    quiet_trainer(tmp_path, strategy=strategy, max_steps=2).fit(PlainModule(tiny_llama()), loader())
    assert strategy.checkpointing.stacks == []
    assert living().keys() <= before_run.keys()
