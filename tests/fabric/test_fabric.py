import itertools
import re
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import LoraConfig, get_peft_model

from lightning_fastft import (
    FineTuner,
    FiniteGuard,
    FusedKernels,
    GradientHealth,
    OffloadCheckpointing,
)
from lightning_fastft.core.errors import ContextError, DamagedCheckpointError, NotTrainingError, OptionError
from lightning_fastft.fabric import FastFTFabric
from lightning_fastft.optim import FusedAdamW
from tests.support.fabric_loops import (
    ACCUMULATE,
    make_data,
    make_model,
    make_optimizer,
    run_fabric,
    run_trainer,
    trained,
)
from tests.support.packs import make_batch
from tests.support.tiny_models import build_tiny
from tests.support.two_ranks import run_two_ranks


def open_fabric(**options):
    fabric = FastFTFabric(accelerator="cpu", devices=1, **options)
    fabric.launch()
    return fabric


@pytest.fixture
def loop():
    """A fabric with a dense model, its optimizer and a loader, before any step."""
    fabric = open_fabric(callbacks=[FusedKernels(), FiniteGuard(max_skips=2, check_every_n_steps=1)])
    plain, data = make_model("qwen3"), make_data()
    loader = fabric.setup_datamodule(data)
    with fabric:
        model, optimizer = fabric.setup(plain, make_optimizer(plain))
        yield SimpleNamespace(fabric=fabric, plain=plain, data=data, model=model, optimizer=optimizer, loader=loader)


def step(loop, batch, *, factor=1.0):
    loss = loop.model(**batch).loss * factor
    loop.fabric.backward(loss)
    loop.fabric.clip_gradients(loop.model, loop.optimizer, max_norm=1.0)
    loop.optimizer.step()
    loop.optimizer.zero_grad()


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_loss_and_gradients_are_those_of_the_trainer_bit_for_bit(policy):
    losses, gradients, weights = run_trainer(policy)
    fabric_losses, fabric_gradients, fabric_weights = run_fabric(policy)
    assert fabric_losses == losses
    assert gradients.keys() == fabric_gradients.keys() != {}.keys()
    assert all(torch.equal(fabric_gradients[name], gradients[name]) for name in gradients)
    assert all(torch.equal(fabric_weights[name], weights[name]) for name in weights)


@pytest.mark.slow(seconds=12)
def test_two_ranks_train_what_two_ranks_of_the_trainer_train():
    run_two_ranks("tests.fabric.ddp_worker")


def test_close_leaves_the_model_as_it_was():
    model = make_model()

    def look():
        return [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()], model.config

    before = look()
    fabric = open_fabric(callbacks=[FusedKernels()], activations=OffloadCheckpointing("recompute"))
    fabric.setup(model, make_optimizer(model))
    assert look() != before
    fabric.close()
    fabric.close()
    assert look() == before
    assert fabric.statuses() == []
    # The next run of the same fabric.
    fabric.setup(model, make_optimizer(model))
    fabric.close()
    assert look() == before


def test_weights_trained_in_fp8_are_quantised_after_each_step_of_a_loop():
    class Unseen(torch.optim.SGD):
        """Writes weights as bitsandbytes does: no version counter shows it."""

        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                parameter.data.add_(parameter.grad, alpha=-0.05)

    found = []
    for kind in (torch.optim.SGD, Unseen):
        plain, data = make_model("qwen3", has_adapters=False), make_data()
        fabric = open_fabric(callbacks=[FusedKernels(base_compute="fp8_reference")])
        loader = fabric.setup_datamodule(data)
        with fabric:
            model, optimizer = fabric.setup(plain, kind(plain.parameters(), lr=0.05))
            assert any(
                (status.name, status.state) == ("fp8 products", "active") and "4 products of 2 layers" in status.reason
                for status in fabric.statuses()
            )
            losses = []
            for batch in itertools.islice(loader, 3):
                loss = model(**batch).loss
                losses.append(loss.item())
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        found.append((losses, trained(plain)))
    (losses, weights), (unseen_losses, unseen_weights) = found
    assert unseen_losses == losses
    assert all(torch.equal(unseen_weights[name], weights[name]) for name in weights)


def test_a_fine_tuner_trains_under_fabric():
    tuner = FineTuner(make_model("qwen3", has_adapters=False), lora={"r": 4})
    tuner.configure_model()
    fabric, data = open_fabric(callbacks=[GradientHealth()]), make_data()
    loader = fabric.setup_datamodule(data)
    before = trained(tuner.model)
    with fabric:
        model, optimizer = fabric.setup(tuner, make_optimizer(tuner))
        for number, batch in enumerate(itertools.islice(loader, 4)):
            fabric.backward(model.training_step(batch, number))
            optimizer.step()
            optimizer.zero_grad()
    after = trained(tuner.model)
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_a_checkpoint_resumes_the_run_and_damage_is_found(tmp_path, loop):
    batches = iter(loop.loader)
    for batch in itertools.islice(batches, 2):
        step(loop, batch)
    path = tmp_path / "run.ckpt"
    state = {"model": loop.model, "optimizer": loop.optimizer, "data": loop.data}
    loop.fabric.save(path, state)
    assert loop.data.state_dict()["micro_batches"] == 2
    step(loop, next(batches))
    trained_on = trained(loop.plain)
    loop.fabric.load(path, state)
    step(loop, next(iter(loop.loader)))
    assert all(torch.equal(trained_on[name], weight) for name, weight in trained(loop.plain).items())

    with pytest.raises(OptionError, match="filter"):
        loop.fabric.save(path, state, filter={"modell": lambda *_: True})
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpointError):
        loop.fabric.load(path, state)


@pytest.mark.parametrize(
    ("targets", "told"),
    [
        (["q_proj", "v_proj", "o_proj"], []),
        (["k_proj"], ["without 4 trained tensors.*k_proj", "has 12 tensors that the module does not have.*q_proj"]),
        (["q_proj", "v_proj", "o_proj", "k_proj"], ["without 4 trained tensors.*k_proj"]),
        (["q_proj"], ["has 8 tensors that the module does not have.*v_proj"]),
    ],
)
def test_adapters_of_a_checkpoint_that_do_not_fit_the_module_are_told(tmp_path, loop, targets, told):
    is_adapter = {"model": lambda name, _: "lora_" in name}
    loop.fabric.save(tmp_path / "adapters.ckpt", {"model": loop.model}, filter=is_adapter)
    model = get_peft_model(build_tiny("qwen3", attention="sdpa"), LoraConfig(r=4, target_modules=targets)).train()
    fabric = open_fabric()
    with fabric, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        wrapped, _ = fabric.setup(model, make_optimizer(model))
        fabric.load(tmp_path / "adapters.ckpt", {"model": wrapped}, strict=False)
    said = [str(warning.message) for warning in found if "The checkpoint" in str(warning.message)]
    assert len(said) == len(told)
    for line, pattern in zip(said, told):
        assert re.search(pattern, line)


def test_a_resumed_run_begins_at_an_accumulation_window():
    data = make_data()
    fabric = open_fabric()
    loader = fabric.setup_datamodule(data, accumulate=ACCUMULATE)
    model = make_model("qwen3")
    with fabric:
        wrapped, _ = fabric.setup(model, make_optimizer(model))
        indices = []
        for batch in itertools.islice(loader, 3):
            fabric.backward(wrapped(**batch).loss / ACCUMULATE)
            indices.append(batch.index)
        assert next(iter(loader)).index == indices[2] == 2


def one_by_one(batches):
    yield from batches


def all_at_once(batches):
    yield from list(batches)


def by_windows(batches):
    batches = iter(batches)
    while window := list(itertools.islice(batches, 2)):
        yield from window


@pytest.mark.parametrize("hand_out", [all_at_once, by_windows])
def test_a_loop_may_ask_for_later_batches_first(hand_out):
    found = []
    for order in (one_by_one, hand_out):
        model, data = make_model("qwen3"), make_data()
        fabric = open_fabric(callbacks=[GradientHealth(num_steps=3), FiniteGuard()])
        loader = fabric.setup_datamodule(data)
        with fabric:
            wrapped, optimizer = fabric.setup(model, make_optimizer(model))
            positions = []
            for batch in order(loader):
                fabric.backward(wrapped(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
                positions.append((batch.index + 1, data.state_dict()["micro_batches"]))
            assert all(index == position for index, position in positions)
            assert {status.name: status.state for status in fabric.statuses()}["gradient health"] == "active"
        found.append((positions, trained(model)))
    (positions, weights), (other_positions, other_weights) = found
    assert positions == other_positions
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def test_a_batch_may_be_asked_for_between_forward_and_backward(loop):
    batches = iter(loop.loader)
    batch, indices = next(batches), []
    while batch is not None and len(indices) < 3:
        loss = loop.model(**batch).loss
        following = next(batches)
        loop.fabric.backward(loss)
        loop.optimizer.step()
        indices.append(loop.data.state_dict()["micro_batches"])
        batch = following
    assert indices == [1, 2, 3]


def test_an_evaluation_before_the_backward_hides_no_dropped_context():
    model, data = make_model("qwen3"), make_data(val_share=0.3)
    fabric = open_fabric()
    loader = fabric.setup_datamodule(data)
    with fabric:
        wrapped, _ = fabric.setup(model, make_optimizer(model))
        batch = next(iter(loader))
        loss = wrapped(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        for other in fabric.setup_dataloaders(data.val_dataloader()):
            with torch.no_grad():
                wrapped(**other)
        with pytest.raises(ContextError, match="documents saw each other"):
            fabric.backward(loss)


def test_the_guard_skips_steps_that_are_not_finite_and_stops(loop):
    batches = iter(loop.loader)
    before = trained(loop.plain)
    step(loop, next(batches), factor=float("nan"))
    assert all(torch.equal(before[name], weight) for name, weight in trained(loop.plain).items())
    with pytest.warns(UserWarning, match="Optimizer step 1 was skipped.*micro-batch 0 of the plan"):
        step(loop, next(batches))
    assert not all(torch.equal(before[name], weight) for name, weight in trained(loop.plain).items())
    with pytest.raises(NotTrainingError, match="max_skips=2"):  # noqa: PT012
        step(loop, next(batches), factor=float("inf"))
        loop.fabric.close()


class Enlarged(torch.autograd.Function):
    """A number whose gradient is far too large, as after an overflow in the backward."""

    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1e30


@pytest.mark.parametrize("optimizer", ["FusedAdamW", "AdamW of torch, read by the host"])
def test_the_guard_sees_gradients_before_they_are_clipped_by_value(optimizer):
    model = make_model("qwen3")
    weights = [each for each in model.parameters() if each.requires_grad]
    inner = FusedAdamW(weights) if optimizer == "FusedAdamW" else torch.optim.AdamW(weights)
    fabric = open_fabric(callbacks=[FiniteGuard(unsupported="wait")])
    loader = fabric.setup_datamodule(make_data())
    with fabric:
        wrapped, outer = fabric.setup(model, inner)
        before = trained(model)
        fabric.backward(Enlarged.apply(wrapped(**next(iter(loader))).loss))
        fabric.clip_gradients(wrapped, outer, clip_val=1e-3)
        outer.step()
        assert all(torch.equal(before[name], weight) for name, weight in trained(model).items())
        with pytest.warns(UserWarning, match="Optimizer step 1 was skipped: gradients"):
            fabric.close()


@pytest.mark.filterwarnings("ignore:FiniteGuard. Optimizer step")
@pytest.mark.parametrize(
    "kind", [FusedAdamW, partial(torch.optim.AdamW, fused=True), torch.optim.AdamW], ids=["ours", "fused", "plain"]
)
def test_a_window_that_the_loop_drops_costs_no_later_step(kind):
    def run(callbacks, **options):
        fabric = open_fabric(callbacks=callbacks)
        loader, plain = fabric.setup_datamodule(make_data()), make_model("qwen3")
        with fabric:
            model, optimizer = fabric.setup(plain, kind([each for each in plain.parameters() if each.requires_grad]))
            for number, batch in enumerate(itertools.islice(loader, 5)):
                fabric.backward(model(**batch).loss * (float("nan") if number == 2 else 1.0))
                norm = fabric.clip_gradients(model, optimizer, max_norm=1.0, **options)
                if torch.isfinite(norm):
                    optimizer.step()
                optimizer.zero_grad()
        return trained(plain)

    guarded = run([FiniteGuard(unsupported="wait")])
    unguarded = run([], error_if_nonfinite=False)
    assert all(torch.equal(weight, guarded[name]) for name, weight in unguarded.items())


@pytest.mark.filterwarnings("ignore:FiniteGuard. Optimizer step")
def test_the_guard_skips_bad_steps_where_torch_would_refuse_to_clip():
    fabric = open_fabric(callbacks=[FiniteGuard()])
    loader, plain = fabric.setup_datamodule(make_data()), make_model("qwen3")
    before = trained(plain)
    with fabric:
        optimizer = torch.optim.AdamW([each for each in plain.parameters() if each.requires_grad], fused=True)
        model, optimizer = fabric.setup(plain, optimizer)
        for _, batch in zip(range(2), loader):
            fabric.backward(model(**batch).loss * float("nan"))
            with pytest.raises(RuntimeError, match="non-finite"):
                fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=True)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert all(torch.equal(weight, before[name]) for name, weight in trained(plain).items())


def test_the_guard_says_that_several_optimizers_do_not_skip_together():
    model, guard = make_model("qwen3"), FiniteGuard()
    weights = [each for each in model.parameters() if each.requires_grad]
    fabric = open_fabric(callbacks=[guard])
    with fabric:
        with pytest.warns(UserWarning, match="guards nothing.*2 optimizers"):
            fabric.setup(model, FusedAdamW(weights[::2]), FusedAdamW(weights[1::2]))
        assert guard.status().state == "refused"


class TestMisuse:
    def test_two_kinds_of_clipping(self, loop):
        loop.fabric.backward(loop.model(**next(iter(loop.loader))).loss)
        with pytest.raises(ValueError, match="Only one of"):
            loop.fabric.clip_gradients(loop.model, loop.optimizer, clip_val=1.0, max_norm=1.0)

    def test_a_batch_whose_context_is_dropped(self, loop):
        batch = next(iter(loop.loader))
        loss = loop.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        with pytest.raises(ContextError, match="documents saw each other"):
            loop.fabric.backward(loss)

    def test_a_batch_whose_context_is_dropped_in_an_evaluation(self, loop):
        batches = iter(loop.loader)
        with torch.no_grad():
            loop.model(input_ids=next(batches)["input_ids"])
        with pytest.raises(ContextError, match="documents saw each other"):
            next(batches)

    def test_a_batch_whose_context_is_dropped_while_a_later_one_is_there(self, loop):
        batches = iter(loop.loader)
        batch, _ = next(batches), next(batches)
        loss = loop.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        with pytest.raises(ContextError, match="documents saw each other"):
            loop.fabric.backward(loss)

    @pytest.mark.parametrize("is_first", [True, False])
    def test_a_batch_whose_context_is_dropped_in_one_of_two_calls(self, loop, is_first):
        batches = iter(loop.loader)
        dropped, whole = next(batches), next(batches)
        calls = [lambda: loop.model(input_ids=dropped["input_ids"], labels=dropped["labels"]).loss]
        calls.insert(is_first, lambda: loop.model(**whole).loss)
        loss = sum(call() for call in calls)
        with pytest.raises(ContextError, match="documents saw each other"):
            loop.fabric.backward(loss)

    def test_a_loader_before_the_model(self):
        fabric = open_fabric()
        loader = fabric.setup_datamodule(make_data())
        with pytest.raises(ContextError, match=r"fabric\.setup"):
            next(iter(loader))

    def test_a_backward_before_the_model_or_its_optimizer(self):
        fabric, model = open_fabric(), make_model("qwen3")
        with pytest.raises(OptionError, match=r"fabric\.setup"):
            fabric.backward(torch.ones((), requires_grad=True))
        with fabric:
            fabric.setup(model)
            with pytest.raises(OptionError, match=r"fabric\.setup"):
                fabric.backward(torch.ones((), requires_grad=True))

    def test_a_step_without_a_backward_of_the_fabric(self, loop):
        loop.model(**next(iter(loop.loader))).loss.backward()
        with pytest.raises(NotTrainingError, match=r"fabric\.backward"):
            loop.optimizer.step()

    def test_a_step_with_a_closure(self, loop):
        with pytest.raises(OptionError, match="closure"):
            loop.optimizer.step(lambda: None)

    def test_a_second_model(self, loop):
        with pytest.raises(OptionError, match="set up already"):
            loop.fabric.setup(make_model("qwen3"))

    def test_an_optimizer_before_its_model(self):
        model = make_model("qwen3")
        with pytest.raises(OptionError, match=r"fabric\.setup"):
            open_fabric().setup_optimizers(make_optimizer(model))

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"strategy": ModelParallelStrategy(lambda model, _: model)}, "fastft_fsdp"),
            ({"strategy": "fastft"}, "leave strategy out on one"),
            ({"strategy": "fastft_fsdp"}, "FSDP2 use Trainer"),
            ({"precision": "bf16-mixed"}, "bf16-mixed"),
            ({"precision": "bf16-true"}, "bf16-true"),
            ({"callbacks": [ModelCheckpoint()]}, "ModelCheckpoint"),
            ({"attention": "flash"}, "attention"),
        ],
    )
    def test_options_that_do_not_fit(self, options, named):
        with pytest.raises(OptionError, match=named):
            FastFTFabric(accelerator="cpu", devices=1, **options)

    def test_a_failed_setup_leaves_the_model_and_the_fabric(self, monkeypatch):
        fabric, model = open_fabric(callbacks=[FusedKernels()]), make_model("qwen3")
        kinds = [type(module) for module in model.modules()]
        with monkeypatch.context() as patch:
            patch.setattr(Fabric, "setup", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                fabric.setup(model)
        assert [type(module) for module in model.modules()] == kinds
        with fabric:
            fabric.setup(model)


def test_setup_in_two_calls_takes_torch_optimizers():
    model = make_model("qwen3")
    fabric = open_fabric(callbacks=[FiniteGuard()])
    loader = fabric.setup_datamodule(make_data())
    with fabric:
        wrapped = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
        batches, before = iter(loader), trained(model)
        fabric.backward(wrapped(**next(batches)).loss * float("nan"))
        fabric.clip_gradients(wrapped, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
        assert all(torch.equal(before[name], weight) for name, weight in trained(model).items())
        with pytest.warns(UserWarning, match="Optimizer step 1 was skipped"):
            fabric.close()


def test_fused_adamw_clips_in_its_step(loop):
    batch = next(iter(loop.loader))
    loop.fabric.backward(loop.model(**batch).loss)
    gradients = {name: each.grad.clone() for name, each in loop.plain.named_parameters() if each.grad is not None}
    norm = loop.fabric.clip_gradients(loop.model, loop.optimizer, max_norm=1e-3)
    assert isinstance(loop.optimizer.optimizer, FusedAdamW)
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(list(gradients.values())))
    loop.optimizer.step()
    assert all(
        torch.equal(gradients[name], each.grad) for name, each in loop.plain.named_parameters() if name in gradients
    )


def test_weights_swapped_through_data_for_an_evaluation_are_evaluated():
    """Adapters in float32 over a base in bfloat16 have low-precision copies, which .data does not mark as stale."""
    model = make_model("llama").to(torch.bfloat16)
    adapters = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in adapters:
        weight.data = weight.data.float()
    batch = make_batch()
    with FastFTFabric(accelerator="cpu", devices=1) as fabric:
        fabric.launch()
        wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(adapters, lr=1e-2))

        def evaluate():
            wrapped.eval()
            with torch.no_grad():
                return wrapped(**batch).loss

        fabric.backward(wrapped(**batch).loss)
        optimizer.step()
        trained, kept = evaluate(), [weight.detach().clone() for weight in adapters]
        wrapped.train()
        loss = wrapped(**batch).loss
        fabric.backward(loss)
        for weight in adapters:
            weight.data.mul_(3.0)
        swapped = evaluate()
        with torch.no_grad():
            for weight, value in zip(adapters, kept):
                weight.copy_(value * 3.0)
        assert torch.equal(swapped, evaluate())
        assert swapped != trained
        for weight, value in zip(adapters, kept):
            weight.data.copy_(value)
        wrapped.train()
        assert torch.equal(wrapped(**batch).loss, loss)
