"""FastFTStrategy: a user's own module trains packed, foreign attention is refused, the device is the Trainer's."""

import os
import pickle
import re
import subprocess
import sys
import weakref
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EMAWeightAveraging, LambdaCallback, StochasticWeightAveraging
from lightning.pytorch.strategies import StrategyRegistry
from torch import nn

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.callbacks.packed_training import PackedTraining
from lightning_fastft.core.errors import ContextError, OptionError, UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.patches.head import STATUS_NAME as HEAD_STATUS
from lightning_fastft.strategies.registry import register_strategies
from lightning_fastft.strategies.single_device import FastFTStrategy
from tests.support.training_parts import (
    VOCAB_SIZE,
    PlainModule,
    packed_batches,
    packed_loader,
    quiet_trainer,
    tiny_llama,
)

register_strategies()
ROOT = Path(__file__).parents[2]


class ForeignModel(nn.Module):
    """A model of somebody's own: its tokens see the whole pack."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, 16)
        self.head = nn.Linear(16, VOCAB_SIZE)

    def forward(self, input_ids, labels, **ignored):
        state = self.embedding(input_ids).cumsum(1)
        loss = nn.functional.cross_entropy(self.head(state)[0, :-1], labels[0, 1:])
        return type("Output", (), {"loss": loss})()


def test_user_module_trains_and_validates_by_name(tmp_path):
    module = PlainModule(tiny_llama())
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer = quiet_trainer(tmp_path, strategy="fastft", max_steps=4)
    trainer.fit(module, packed_loader(4), packed_loader(2, seed=50))
    assert isinstance(trainer.strategy, FastFTStrategy)
    assert trainer.global_step == 4
    assert {"train_loss", "val_loss"} <= set(trainer.callback_metrics)
    assert all(
        not torch.equal(before[name], value) for name, value in module.state_dict().items() if "inv_freq" not in name
    )


def test_training_equals_plain_torch_on_each_document_alone(tmp_path):
    batches = packed_batches(3)
    ours = PlainModule(tiny_llama())
    plain = tiny_llama()
    plain.load_state_dict(ours.model.state_dict())
    quiet_trainer(tmp_path, strategy="fastft", max_steps=3).fit(ours, packed_loader(3))

    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    for batch in batches:
        optimizer.zero_grad()
        offsets = batch.context.start_host_S1.tolist()
        for start, end in pairwise(offsets):
            ids, labels = batch["input_ids"][:, start:end], batch["labels"][:, start:end]
            plain(input_ids=ids, labels=labels, num_items_in_batch=batch.context.num_items).loss.backward()
        optimizer.step()
    for (name, expected), value in zip(plain.state_dict().items(), ours.model.state_dict().values()):
        assert torch.linalg.vector_norm(value - expected) <= 1e-4 * torch.linalg.vector_norm(expected), name


def test_swaps_are_undone_after_fit_and_after_an_exception(tmp_path):
    module = PlainModule(tiny_llama())
    head, attention = module.model.lm_head, module.model.config._attn_implementation
    strategy = FastFTStrategy(activations=OffloadCheckpointing("recompute"))
    quiet_trainer(tmp_path, strategy=strategy).fit(module, packed_loader())
    assert module.model.lm_head is head
    assert module.model.config._attn_implementation == attention
    assert not module.model.is_gradient_checkpointing

    class Fails(PlainModule):
        def on_before_zero_grad(self, optimizer):
            assert self.model.lm_head is not head
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        quiet_trainer(tmp_path, strategy="fastft").fit(Fails(module.model), packed_loader())
    assert module.model.lm_head is head
    assert module.model.config._attn_implementation == attention


def test_foreign_attention_is_refused_before_the_backward(tmp_path):
    module = PlainModule(ForeignModel())
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ContextError, match="PackedTraining") as error:
        quiet_trainer(tmp_path, strategy="fastft").fit(module, packed_loader())
    assert "training_step of PlainModule" in str(error.value)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_attention_set_back_by_the_user_is_refused_and_named(tmp_path):
    class SetBack(PlainModule):
        def on_fit_start(self):
            self.model.set_attn_implementation("eager")

    module = SetBack(tiny_llama())
    with pytest.raises(ContextError, match=r"model: LlamaForCausalLM, attention 'eager'"):
        quiet_trainer(tmp_path, strategy="fastft").fit(module, packed_loader())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_foreign_validation_is_refused(tmp_path):
    with pytest.raises(ContextError, match="validation_step"):
        quiet_trainer(tmp_path, strategy="fastft").validate(PlainModule(ForeignModel()), packed_loader(), verbose=False)


def test_batches_without_labels_and_skipped_steps_are_fine(tmp_path):
    class Skips(PlainModule):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 0 else super().training_step(batch, batch_idx)

    batches = packed_batches(1) + packed_batches(1, has_labels=False) + packed_batches(2)
    trainer = quiet_trainer(tmp_path, strategy="fastft", max_steps=4)
    trainer.fit(Skips(tiny_llama()), torch.utils.data.DataLoader(batches, batch_size=None))
    assert trainer.global_step == 4


def test_batches_that_a_loader_keeps_are_judged_anew_each_time(tmp_path):
    module = PlainModule(tiny_llama())
    loader = packed_loader(2)
    quiet_trainer(tmp_path, strategy="fastft", max_steps=2).fit(module, loader)
    with pytest.raises(ContextError):
        quiet_trainer(tmp_path, strategy="fastft", max_steps=2).fit(PlainModule(ForeignModel()), loader)


def test_lazily_built_model_is_served(tmp_path):
    class Lazy(PlainModule):
        def __init__(self):
            super().__init__(None)

        def configure_model(self):
            if self.model is None:
                self.model = tiny_llama()

    trainer = quiet_trainer(tmp_path, strategy="fastft")
    trainer.fit(Lazy(), packed_loader())
    assert trainer.global_step == 3


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_trains_under_lightnings_precisions(tmp_path, precision):
    module = PlainModule(tiny_llama())
    trainer = quiet_trainer(tmp_path, strategy="fastft", precision=precision)
    trainer.fit(module, packed_loader())
    assert torch.isfinite(trainer.callback_metrics["train_loss"])


def test_unservable_family_is_refused_by_name(tmp_path):
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(UnsupportedModelError, match=r"(?i)mamba"):
        quiet_trainer(tmp_path, strategy="fastft").fit(PlainModule(MambaForCausalLM(config)), packed_loader())


def test_module_without_a_model_trains_on_its_own_batches(tmp_path):
    module = PlainModule(ForeignModel())
    batches = [
        {"input_ids": torch.randint(0, VOCAB_SIZE, (1, 9)), "labels": torch.randint(0, VOCAB_SIZE, (1, 9))}
        for _ in range(3)
    ]
    trainer = quiet_trainer(tmp_path, strategy="fastft")
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    states = {status.name: status.state for status in trainer.strategy.statuses()}
    assert {name for name, state in states.items() if state != "inactive"} == {"exact resume", "checkpoints"}


WITHOUT_TRANSFORMERS = """
import sys
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
import lightning_fastft
Trainer(strategy="fastft", max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False).fit(BoringModel())
assert not {"bitsandbytes", "transformers.modeling_utils"} & set(sys.modules), "imported for no model"
# bitsandbytes has an Adam of its own, which would make this name ambiguous.
cli = LightningCLI(BoringModel, args=["--optimizer=Adam"], run=False)
assert cli.config.optimizer.class_path == "torch.optim.Adam"
"""


@pytest.mark.fault
def test_module_without_a_model_imports_no_library_of_models(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT_TRANSFORMERS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_callbacks_that_a_search_took_out_are_not_an_option_of_the_user(tmp_path):
    # Lightning's searches fit without the callbacks of the run.
    trainer = quiet_trainer(tmp_path, strategy="fastft")
    trainer.fit(PlainModule(tiny_llama()), packed_loader())
    trainer.callbacks = []
    (status,) = (status for status in trainer.strategy.statuses() if status.name == "exact resume")
    assert "exact_resume=False" not in status.reason


def test_status_table_is_logged_and_names_the_backend_that_ran(tmp_path):
    with mock.patch("lightning_fastft.strategies.mixin.rank_zero_info") as log:
        trainer = quiet_trainer(tmp_path, strategy="fastft")
        trainer.fit(PlainModule(tiny_llama()), packed_loader())
    table, backend = (call.args[0] for call in log.call_args_list)
    assert re.search(r"packed attention +active", table)
    assert re.search(rf"{HEAD_STATUS} +active", table)
    assert backend == "packed attention ran on: sdpa"
    by_name = {status.name: status for status in trainer.strategy.statuses()}
    assert by_name["packed attention"].reason.endswith("ran: sdpa")
    assert by_name["activations"].reason.startswith("auto: on a CPU every activation is kept")


def test_forced_backend_runs_and_an_unknown_one_is_refused(tmp_path):
    trainer = quiet_trainer(tmp_path, strategy=FastFTStrategy(attention="reference"))
    trainer.fit(PlainModule(tiny_llama()), packed_loader())
    assert set(trainer.strategy.packed_steps.backends_used) == {"reference"}
    with pytest.raises(OptionError, match="varlen"):
        FastFTStrategy(attention="fastest")


def test_name_lands_on_the_gpu_and_refuses_two_devices(tmp_path):
    with (
        mock.patch("lightning.fabric.accelerators.cuda.num_cuda_devices", return_value=2),
        mock.patch("lightning.pytorch.accelerators.cuda.num_cuda_devices", return_value=2),
    ):
        options = {"strategy": "fastft", "accelerator": "cuda"}
        assert quiet_trainer(tmp_path, devices=1, **options).strategy.root_device == torch.device("cuda", 0)
        assert quiet_trainer(tmp_path, devices=[1], **options).strategy.root_device == torch.device("cuda", 1)
        assert quiet_trainer(
            tmp_path, devices=1, accelerator="auto", strategy=FastFTStrategy()
        ).strategy.root_device == torch.device("cuda", 0)
        with pytest.raises(OptionError, match="one device"):
            quiet_trainer(tmp_path, devices=2, **options)


def test_strategy_pickles_before_setup_and_serves_one_trainer(tmp_path):
    strategy = pickle.loads(pickle.dumps(FastFTStrategy(activations=OffloadCheckpointing("recompute"))))
    assert strategy.checkpointing.policy == "recompute"
    module = PlainModule(tiny_llama())
    trainer = quiet_trainer(tmp_path, strategy=strategy, accelerator="auto")
    trainer.fit(module, packed_loader())
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(module, packed_loader())
    assert trainer.global_step == 6
    with pytest.raises(MisconfigurationException):
        quiet_trainer(tmp_path, strategy=strategy, accelerator="auto")


def test_wrong_activations_are_refused():
    with pytest.raises(OptionError, match="OffloadCheckpointing"):
        FastFTStrategy(activations="recompute")


def test_registration_is_idempotent():
    register_strategies()
    assert StrategyRegistry["fastft"]["strategy"] is FastFTStrategy


def test_failed_set_up_leaves_the_model_as_it_was():
    module = PlainModule(tiny_llama())
    module.model.gradient_checkpointing_enable()
    head, attention = module.model.lm_head, module.model.config._attn_implementation
    strategy = FastFTStrategy(activations=OffloadCheckpointing("keep"))
    patcher = ModelPatcher()
    with pytest.raises(OptionError, match="already recomputes"):
        strategy.packed_steps.install(module, patcher)
    assert module.model.lm_head is head
    assert module.model.config._attn_implementation == attention
    assert len(patcher) == 0
    assert not strategy.packed_steps.is_installed


class RunsOutOfMemory(PlainModule):
    """Fails in a given step, as a device does that has less memory than the plan thought: once in the forward, in every
    backward.
    """

    def __init__(self, model, *, where, fails_at=5):
        super().__init__(model)
        self.where, self.fails_at, self.num_steps = where, fails_at, 0

    def training_step(self, batch, batch_idx):
        self.num_steps += 1
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_step == self.fails_at:
            if self.where == "forward" and self.num_steps == self.fails_at + 1:
                activations = torch.ones(3)
                self.activations = weakref.ref(activations)
                raise torch.OutOfMemoryError("planted")
            if self.where == "backward":
                loss.register_hook(self.fail)
        return loss

    def fail(self, gradient):
        raise torch.OutOfMemoryError("planted")


def test_a_forward_that_runs_out_of_memory_is_repeated_under_a_smaller_plan(tmp_path):
    strategy = FastFTStrategy(activations=OffloadCheckpointing("auto", vram_budget=1000.0, host_budget=1.0))
    module = RunsOutOfMemory(tiny_llama(), where="forward")
    held = []

    def report(text):
        if "planned again" in text:
            held.append(module.activations() is not None)

    with (
        mock.patch("lightning_fastft.strategies.packed_steps.rank_zero_info", report),
        pytest.warns(UserWarning, match="repeated with less"),
    ):
        quiet_trainer(tmp_path, strategy=strategy, max_steps=8).fit(module, packed_loader(8))
    assert module.num_steps == 9
    # One smaller plan, made when what the failed forward held was gone.
    assert held == [False]


def test_a_repeated_backward_that_runs_out_of_memory_says_which_budget_to_take(tmp_path):
    strategy = FastFTStrategy(activations=OffloadCheckpointing("auto", vram_budget=1000.0, host_budget=1.0))
    module = RunsOutOfMemory(tiny_llama(), where="backward")
    with (
        pytest.warns(UserWarning, match="repeated with less"),
        pytest.raises(torch.OutOfMemoryError, match=r"vram_budget=0\.0\)"),
    ):
        quiet_trainer(tmp_path, strategy=strategy, max_steps=8).fit(module, packed_loader(8))
    assert module.num_steps == module.fails_at + 4


def model_with_frozen_layers():
    model = tiny_llama().requires_grad_(False)
    model.model.norm.weight.requires_grad_()
    model.model.layers[0].input_layernorm.weight.requires_grad_()
    return model


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_first_steps_that_do_not_fit_are_measured_with_streamed_weights(tmp_path, fails_at):
    strategy = FastFTStrategy(activations=OffloadCheckpointing("auto", vram_budget=1000.0, host_budget=1.0))
    module = RunsOutOfMemory(model_with_frozen_layers(), where="forward", fails_at=fails_at)
    trainer = quiet_trainer(tmp_path, strategy=strategy, max_steps=8)
    found, reports = [], []
    trainer.callbacks.append(LambdaCallback(on_train_end=lambda *_: found.extend(strategy.statuses())))
    with (
        mock.patch("lightning_fastft.strategies.packed_steps.rank_zero_info", reports.append),
        pytest.warns(UserWarning, match="repeated with less"),
    ):
        trainer.fit(module, packed_loader(8))
    assert {status.name: status.state for status in found}["frozen weights"] == "active"
    assert module.num_steps == 9
    # Streamed first, then measured from the start and planned.
    streamed = next(number for number, text in enumerate(reports) if "do not fit with all weights" in text)
    assert any("streams over time" in text for text in reports[streamed:])


@pytest.mark.parametrize("callback", [EMAWeightAveraging(), StochasticWeightAveraging(swa_lrs=1e-2)])
def test_averages_of_streamed_weights_are_refused_before_the_first_step(tmp_path, callback):
    strategy = FastFTStrategy(activations=OffloadCheckpointing("recompute", weights="stream"))
    module = PlainModule(model_with_frozen_layers())
    with pytest.raises(OptionError, match=type(callback).__name__ + r".*weights='resident'"):
        quiet_trainer(tmp_path, strategy=strategy, callbacks=[callback]).fit(module, packed_loader())


def test_weights_of_an_average_stay_where_they_are(tmp_path):
    strategy = FastFTStrategy(activations=OffloadCheckpointing("auto", vram_budget=1000.0, host_budget=1.0))
    module = RunsOutOfMemory(model_with_frozen_layers(), where="forward", fails_at=0)
    trainer = quiet_trainer(tmp_path, strategy=strategy, max_steps=4, callbacks=[EMAWeightAveraging()])
    found = []
    trainer.callbacks.append(LambdaCallback(on_train_end=lambda *_: found.extend(strategy.statuses())))
    with pytest.warns(UserWarning, match="repeated with less"):
        trainer.fit(module, packed_loader(8))
    assert not any(status.name == "frozen weights" for status in found)


@pytest.mark.parametrize(
    ("mlp_tiles", "num_steps", "advice"),
    [("auto", 5, "start again with shorter packs"), (1, 4, r"weights='stream', mlp_tiles=8\)")],
)
def test_a_first_backward_that_never_fits_gets_all_that_takes_less_memory(tmp_path, mlp_tiles, num_steps, advice):
    activations = OffloadCheckpointing("auto", vram_budget=1000.0, host_budget=1.0, mlp_tiles=mlp_tiles)
    strategy = FastFTStrategy(activations=activations)
    module = RunsOutOfMemory(model_with_frozen_layers(), where="backward", fails_at=1)
    with pytest.warns(UserWarning, match="repeated with less"), pytest.raises(torch.OutOfMemoryError, match=advice):
        quiet_trainer(tmp_path, strategy=strategy, max_steps=8).fit(module, packed_loader(8))
    # Of the first step one; of the second the first try, one with streamed weights, one without a kept layer, and one
    # in tiles.
    assert module.num_steps == num_steps


@pytest.mark.parametrize("policy", ["auto", "keep", "recompute", "offload"])
def test_student_learns_beside_a_frozen_teacher_in_evaluation_mode(tmp_path, policy):
    class Distil(PlainModule):
        def __init__(self):
            super().__init__(tiny_llama())
            self.teacher = tiny_llama().eval().requires_grad_(False)

        def on_train_epoch_start(self):
            self.teacher.eval()

        def training_step(self, batch, batch_idx):
            with torch.no_grad():
                truth = self.teacher(**batch).loss
            return self.model(**batch).loss + 0 * truth

    module = Distil()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    quiet_trainer(tmp_path, strategy=FastFTStrategy(activations=OffloadCheckpointing(policy))).fit(
        module, packed_loader()
    )
    moved = {name for name, value in module.state_dict().items() if not torch.equal(before[name], value)}
    assert moved
    assert all(name.startswith("model.") for name in moved)


@pytest.mark.parametrize("strategy", ["fastft", "auto"])
def test_manual_steps_that_return_nothing_are_judged(tmp_path, strategy):
    class Manual(PlainModule):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.manual_backward(self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss)

    callbacks = [] if strategy == "fastft" else [PackedTraining()]
    with pytest.raises(ContextError):
        quiet_trainer(tmp_path, strategy=strategy, callbacks=callbacks).fit(Manual(tiny_llama()), packed_loader())


def test_several_processes_of_a_launcher_are_refused_before_training(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match="each would train alone"):
        FastFTStrategy().setup_environment()
