"""FineTuner's default optimizer: weights, clipping and compute copies in one pass, resumed from checkpoints of
torch.optim.AdamW.
"""

import functools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_fastft.callbacks.finite_guard import FiniteGuard
from lightning_fastft.callbacks.gradient_health import GradientHealth
from lightning_fastft.core.errors import NotTrainingError, OptionError
from lightning_fastft.moe.low_precision_copy import LowPrecisionCopy
from lightning_fastft.strategies.packed_steps import missing_optimizer_bytes
from lightning_fastft.training.optimization import adamw_state
from lightning_fastft.training.optimizer import FusedAdamW
from tests.support.fine_tuners import trainable, tuner
from tests.support.training_parts import packed_batches, quiet_trainer


class Recorder(Callback):
    """The gradients that callbacks see before the step, and those that are left behind it."""

    def __init__(self):
        self.before, self.after = [], []

    def read(self, module):
        return {name: None if param.grad is None else param.grad.clone() for name, param in trainable(module).items()}

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.before.append(self.read(pl_module))

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.after.append(self.read(pl_module))


class ClipsInPlace:
    """Clipping of gradients in place, by the norm whose bits the twin has."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        groups = [
            [param.grad for param in group["params"] if param.grad is not None] for group in optimizer.param_groups
        ]
        # Of each group in float64, rounded, and those together: of all at once the last bit may be another, on one
        # processor and not on the next.
        norms = [
            torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt().float()
            for grads in groups
            if grads
        ]
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        for grad in (grad for grads in groups for grad in grads):
            grad.mul_(torch.clamp(gradient_clip_val / (norm + 1e-6), max=1.0))


def fit_tuner(
    tmp_path,
    *,
    mode="lora",
    module=None,
    num_steps=5,
    callbacks=(),
    ckpt_path=None,
    optimizer=None,
    batches=None,
    **options,
):
    seed_everything(7, verbose=False)
    module = tuner(mode, optimizer=optimizer, weight_decay=0.1) if module is None else module
    options = {
        "strategy": "fastft",
        "max_steps": num_steps,
        "callbacks": list(callbacks),
        "gradient_clip_val": 0.01,
        **options,
    }
    trainer = quiet_trainer(tmp_path, **options)
    trainer.fit(
        module, DataLoader(packed_batches(2) * 3 if batches is None else batches, batch_size=None), ckpt_path=ckpt_path
    )
    return module, trainer


def assert_same_weights(one, other):
    expected = trainable(other)
    assert trainable(one).keys() == expected.keys()
    for name, param in trainable(one).items():
        assert torch.equal(param, expected[name]), name


@pytest.mark.parametrize("mode", ["full", "lora", "lora_bf16"])
def test_a_fit_with_clipping_has_the_weights_of_torch_with_clipping_in_place(tmp_path, mode, monkeypatch):
    recorder, plain_recorder = Recorder(), Recorder()
    ours, trainer = fit_tuner(tmp_path, mode=mode, callbacks=[recorder])
    assert type(trainer.optimizers[0]) is FusedAdamW
    monkeypatch.setattr(
        "lightning_fastft.training.fine_tuner.FineTuner.configure_gradient_clipping",
        ClipsInPlace.configure_gradient_clipping,
    )
    plain, trainer = fit_tuner(
        tmp_path,
        mode=mode,
        optimizer=lambda groups: torch.optim.AdamW(groups, foreach=False),
        callbacks=[plain_recorder],
    )
    assert type(trainer.optimizers[0]) is torch.optim.AdamW
    assert_same_weights(ours, plain)
    assert len(recorder.before) == 5
    for before, plain_before, after in zip(recorder.before, plain_recorder.before, recorder.after):
        # Callbacks see what they saw, and clipping writes to no gradient.
        assert all(torch.equal(before[name], plain_before[name]) for name in before)
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    "options", [{"gradient_clip_algorithm": "value"}, {"gradient_clip_val": None}, {"gradient_clip_val": 0.0}]
)
def test_other_clipping_is_lightnings(tmp_path, options):
    ours, trainer = fit_tuner(tmp_path, **options)
    assert type(trainer.optimizers[0]) is FusedAdamW
    plain, _ = fit_tuner(tmp_path, optimizer=lambda groups: torch.optim.AdamW(groups, foreach=False), **options)
    assert_same_weights(ours, plain)


def test_accumulated_gradients_are_clipped_once_per_step(tmp_path):
    with mock.patch.object(FusedAdamW, "clip_next", autospec=True, side_effect=FusedAdamW.clip_next) as clip:
        fit_tuner(tmp_path, num_steps=3, accumulate_grad_batches=2)
    assert [call.args[1] for call in clip.call_args_list] == [0.01] * 3


@pytest.mark.parametrize("is_ours", [True, False])
def test_compute_copies_are_written_by_the_step_and_not_again(tmp_path, is_ours):
    copied, seen = [], []

    class Watching(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            copies = pl_module.low_precision_adapters._copies()
            assert len(copies) == 28
            assert all(torch.equal(copy.tensor, copy.master.bfloat16()) and copy.is_current() for copy in copies)
            seen.append(len(copied))

        def on_train_start(self, trainer, pl_module):
            copied.clear()

    def copy_all(copies, *args):
        copied.extend(copies)
        return foreach_copy(copies, *args)

    def copy_one(copy):
        # Its first copy is made with it.
        if "_version" in vars(copy):
            copied.append(copy.tensor)
        return copy_master(copy)

    foreach_copy, copy_master = torch._foreach_copy_, LowPrecisionCopy.copy_master
    optimizer = None if is_ours else lambda groups: torch.optim.AdamW(groups, foreach=False)
    with (
        mock.patch.object(torch, "_foreach_copy_", copy_all),
        mock.patch.object(LowPrecisionCopy, "copy_master", copy_one),
    ):
        fit_tuner(tmp_path, mode="lora_bf16", optimizer=optimizer, callbacks=[Watching()], num_steps=3)
    assert seen == ([0, 0, 0] if is_ours else [28, 56, 84])


def test_a_copy_that_the_step_wrote_is_copied_again_when_its_master_changes_or_anybody_else_asks(tmp_path):
    module = tuner("lora_bf16")
    checked = []

    class Changing(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            copies, kept = pl_module.low_precision_adapters, pl_module.low_precision_adapters._copies()
            for change in ("seen", "unseen", "unwritten"):
                copies.mark_written([copy.tensor for copy in kept] if change != "unwritten" else [])
                with torch.no_grad():
                    for copy in kept:
                        copy.master.add_(1.0) if change == "seen" else copy.master.data.add_(1.0)
                copies.refresh(is_after_step=change != "unseen")
                assert all(torch.equal(copy.tensor, copy.master.bfloat16()) for copy in kept), change
                checked.append(change)

    fit_tuner(tmp_path, module=module, callbacks=[Changing()], num_steps=1)
    assert len(checked) == 3


# The run goes on for more steps than the first one had, and once from a file of torch's own: both is said.
@pytest.mark.filterwarnings("ignore:Resumed with another setting", "ignore:.* has no digest")
@pytest.mark.parametrize("first", ["ours", "torch", "fused"])
def test_a_checkpoint_of_either_optimizer_is_resumed(tmp_path, first):
    factories = {
        "ours": None,
        "torch": lambda groups: torch.optim.AdamW(groups, foreach=False),
        "fused": lambda groups: torch.optim.AdamW(groups, fused=True),
    }
    keep = ModelCheckpoint(
        dirpath=tmp_path, filename="{step}", save_on_train_epoch_end=False, every_n_train_steps=3, save_top_k=-1
    )
    fit_tuner(
        tmp_path,
        mode="lora_bf16",
        optimizer=factories[first],
        num_steps=3,
        callbacks=[keep],
        enable_checkpointing=True,
        gradient_clip_val=None,
    )
    path = tmp_path / "step=3.ckpt"
    content = torch.load(path, weights_only=True)
    resumed, trainer = fit_tuner(tmp_path, mode="lora_bf16", ckpt_path=path, gradient_clip_val=None)
    assert type(trainer.optimizers[0]) is FusedAdamW
    assert {float(state["step"]) for state in trainer.optimizers[0].state.values()} == {5.0}
    for group in content["optimizer_states"][0]["param_groups"]:
        group.pop("fused", None)
    torch.save(content, tmp_path / "plain.ckpt")
    plain, _ = fit_tuner(
        tmp_path,
        mode="lora_bf16",
        optimizer=factories["torch"],
        ckpt_path=tmp_path / "plain.ckpt",
        gradient_clip_val=None,
    )
    assert_same_weights(resumed, plain)


def test_a_scaler_and_an_optimizer_of_the_users_own_are_obeyed(tmp_path):
    module, _ = fit_tuner(tmp_path, num_steps=1, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))
    module.optimizer_factory = None
    module._trainer = SimpleNamespace(scaler=object(), strategy=module.trainer.strategy)
    assert type(module._make_optimizer()) is torch.optim.AdamW
    module._trainer = SimpleNamespace(scaler=None, strategy=object())
    assert type(module._make_optimizer()) is torch.optim.AdamW


@pytest.mark.parametrize("is_spoilt", [False, True])
def test_gradient_health_judges_the_step_in_one_pass(tmp_path, is_spoilt):
    class Spoiling(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            if is_spoilt and trainer.global_step == 1:
                next(iter(trainable(pl_module).values())).grad.view(-1)[0] = float("inf")

    health = GradientHealth(num_steps=4)
    if is_spoilt:
        with pytest.raises(NotTrainingError, match=r"step 2 of this run for 1 of 28 tensors.*q_proj"):
            fit_tuner(tmp_path, mode="lora_bf16", callbacks=[Spoiling(), health])
    else:
        fit_tuner(tmp_path, mode="lora_bf16", callbacks=[Spoiling(), health])
        assert "28 tensors moved" in health.status().reason


# Masters of whole bf16 weights.


def narrow_tuner(**options):
    """Every weight trained in bf16, at a rate at which norms of magnitude 1 stay where they are without masters."""
    return tuner(
        "full", **{"dtype": "bfloat16", "learning_rate": 1e-4, "scheduler": "constant", "warmup_share": 0.0, **options}
    )


def test_masters_move_where_their_rounded_values_stand_still(tmp_path):
    health = GradientHealth(num_steps=4)
    with pytest.raises(NotTrainingError, match="norm"):
        fit_tuner(tmp_path, module=narrow_tuner(), callbacks=[GradientHealth(num_steps=4)])
    module, trainer = fit_tuner(tmp_path, module=narrow_tuner(master_dtype="float32"), callbacks=[health])
    assert "moved" in health.status().reason
    (optimizer,) = trainer.optimizers
    assert isinstance(optimizer, FusedAdamW)
    for name, parameter in trainable(module).items():
        master = optimizer.state[parameter]["master"]
        assert parameter.dtype is torch.bfloat16
        assert torch.equal(master.to(torch.bfloat16), parameter), name
    norm = module.model.model.norm.weight
    assert torch.equal(norm, torch.ones_like(norm))
    assert not torch.equal(optimizer.state[norm]["master"], torch.ones_like(norm, dtype=torch.float32))


def test_a_run_with_masters_is_resumed_to_the_bit(tmp_path):
    keep = ModelCheckpoint(
        dirpath=tmp_path, filename="{step}", save_on_train_epoch_end=False, every_n_train_steps=3, save_top_k=-1
    )
    # One batch again and again: which comes next is the data module's.
    options = {"batches": packed_batches(1) * 6, "enable_checkpointing": True}
    whole, trainer = fit_tuner(tmp_path, module=narrow_tuner(master_dtype="float32"), callbacks=[keep], **options)
    resumed, other = fit_tuner(
        tmp_path, module=narrow_tuner(master_dtype="float32"), ckpt_path=tmp_path / "step=3.ckpt", **options
    )
    assert_same_weights(resumed, whole)
    for parameter, twin in zip(trainable(resumed).values(), trainable(whole).values()):
        master = trainer.optimizers[0].state[twin]["master"]
        assert torch.equal(other.optimizers[0].state[parameter]["master"], master)
        assert not torch.equal(master, twin.float())


def test_a_run_with_averages_in_8_bits_is_guarded_clipped_and_resumed_to_the_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(adamw_state, "MIN_8BIT_SIZE", 256)
    factory = functools.partial(FusedAdamW, lr=1e-3, optim_bits=8)
    keep = ModelCheckpoint(
        dirpath=tmp_path, filename="{step}", save_on_train_epoch_end=False, every_n_train_steps=3, save_top_k=-1
    )
    options = {"batches": packed_batches(1) * 6, "enable_checkpointing": True, "gradient_clip_val": 0.1}
    guard = FiniteGuard()
    whole, trainer = fit_tuner(tmp_path, module=narrow_tuner(optimizer=factory), callbacks=[keep, guard], **options)
    resumed, other = fit_tuner(
        tmp_path,
        module=narrow_tuner(optimizer=factory),
        callbacks=[FiniteGuard()],
        ckpt_path=tmp_path / "step=3.ckpt",
        **options,
    )
    assert guard.status().state == "active"
    assert_same_weights(resumed, whole)
    held = set()
    for parameter, twin in zip(trainable(resumed).values(), trainable(whole).values()):
        state, own = (
            optimizers[0].state[each]
            for optimizers, each in ((other.optimizers, parameter), (trainer.optimizers, twin))
        )
        assert all(torch.equal(tensor, own[name]) for name, tensor in state.items())
        held.add(own["exp_avg"].dtype)
    assert held == {torch.uint8, torch.float32}


def test_memory_for_masters_is_planned(tmp_path):
    module = narrow_tuner(master_dtype="float32")
    fit_tuner(tmp_path, module=module, num_steps=1)
    num_weights = sum(parameter.numel() for parameter in trainable(module).values())
    fresh = FusedAdamW(trainable(module).values(), master_weights=True)
    assert missing_optimizer_bytes([fresh]) == 12 * num_weights
    assert missing_optimizer_bytes([FusedAdamW(trainable(module).values())]) == 8 * num_weights
    assert missing_optimizer_bytes([torch.optim.AdamW(trainable(module).values())]) == 4 * num_weights
    assert missing_optimizer_bytes([torch.optim.SGD(trainable(module).values())]) == 0
    assert missing_optimizer_bytes([torch.optim.AdamW(trainable(module).values(), amsgrad=True)]) == 6 * num_weights


def test_memory_of_an_optimizer_is_planned_until_it_has_state():
    optim = pytest.importorskip("bitsandbytes.optim")
    params = [torch.nn.Parameter(torch.ones(64, 64)) for _ in range(2)]
    optimizer = optim.AdamW8bit(params)
    # Two codes of 8 bits and the scales of 16 blocks for each, and two tables of 256 codes.
    one = 2 * (4096 + 4 * 16)
    assert missing_optimizer_bytes([optimizer]) == 2 * one + 2 * 1024
    params[1].grad = torch.ones_like(params[1])
    optimizer.step()
    assert missing_optimizer_bytes([optimizer]) == one + 2 * 1024
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert missing_optimizer_bytes([optimizer]) == 0


def test_memory_of_an_unknown_optimizer_is_two_moments():
    class Own(torch.optim.SGD):
        pass

    params = [torch.nn.Parameter(torch.ones(8, 8))]
    assert missing_optimizer_bytes([Own(params)]) == 2 * 4 * 64
    # A step takes a closure.
    assert missing_optimizer_bytes([torch.optim.LBFGS(params)]) == 2 * 4 * 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": torch.optim.SGD}, "another one was given"),
        ({"dtype": "float16"}, "fastft_fsdp"),
        ({"dtype": "float32", "master_dtype": "bfloat16"}, "fastft_fsdp"),
    ],
)
def test_masters_that_cannot_be_held_are_refused(tmp_path, options, message):
    with pytest.raises(OptionError, match=message):
        fit_tuner(tmp_path, module=narrow_tuner(**{"master_dtype": "float32", **options}))


def test_weights_that_are_held_in_fp32_need_no_master(tmp_path):
    _, trainer = fit_tuner(tmp_path, module=narrow_tuner(dtype="float32", master_dtype="float32"), num_steps=1)
    assert not trainer.optimizers[0].master_weights


def test_optimizer_that_refuses_vectors_is_refused_with_the_way_out(tmp_path):
    module = tuner(lora=None, optimizer=functools.partial(torch.optim.Muon, lr=1e-3))
    with pytest.raises(OptionError, match=r"adapters .* use lightning_fastft.optim.MuonAdamW"):
        quiet_trainer(tmp_path, strategy="fastft").fit(module, DataLoader(packed_batches(2), batch_size=None))


def test_wrong_option_of_fused_adamw_is_answered_without_other_advice(tmp_path):
    module = tuner(lora=None, optimizer=functools.partial(FusedAdamW, offload=2.0))
    with pytest.raises(OptionError, match=r"^offload must be [^M]+$"):
        quiet_trainer(tmp_path, strategy="fastft").fit(module, DataLoader(packed_batches(2), batch_size=None))


def test_a_run_without_training_batches_needs_no_length(tmp_path):
    module = tuner()
    trainer = quiet_trainer(
        tmp_path, strategy="fastft", max_steps=-1, max_epochs=1, limit_train_batches=0, callbacks=[Recorder()]
    )
    trainer.fit(module, DataLoader(packed_batches(2), batch_size=None))
    assert trainer.state.finished
    assert trainer.global_step == 0
