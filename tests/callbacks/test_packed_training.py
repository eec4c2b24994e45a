"""PackedTraining: what strategy="fastft" does, under other strategies."""

import re
from unittest import mock

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.strategies import SingleDeviceStrategy

import lightning_fastft
from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.callbacks.packed_training import PackedTraining
from lightning_fastft.core.errors import ContextError, OptionError
from lightning_fastft.strategies.registry import register_strategies
from lightning_fastft.strategies.single_device import FastFTStrategy
from tests.callbacks.packed_training_worker import train_on_one_process
from tests.strategies.test_single_device import ForeignModel
from tests.support.training_parts import VOCAB_SIZE, PlainModule, packed_loader, quiet_data, quiet_trainer, tiny_llama
from tests.support.two_ranks import run_two_ranks

register_strategies()


class LazyModule(PlainModule):
    def __init__(self):
        super().__init__(None)

    def configure_model(self):
        if self.model is None:
            self.model = tiny_llama()


@pytest.mark.parametrize("make_module", [lambda: PlainModule(tiny_llama()), LazyModule], ids=["eager", "lazy"])
def test_trains_under_the_automatic_strategy(tmp_path, make_module):
    callback, module = PackedTraining(), make_module()
    trainer = quiet_trainer(tmp_path, strategy="auto", callbacks=[callback], max_steps=4)
    trainer.fit(module, packed_loader(4), packed_loader(2, seed=9))
    assert type(trainer.strategy) is SingleDeviceStrategy
    assert trainer.global_step == 4
    assert set(callback.packed_steps.backends_used) == {"sdpa"}
    assert type(module.model.lm_head) is torch.nn.Linear
    assert module.model.config._attn_implementation != "fastft"


@pytest.mark.parametrize("strategy", ["fastft", "auto"])
def test_a_loader_without_its_data_module_is_refused(tmp_path, strategy):
    class Own(LightningDataModule):
        def __init__(self, trainer):
            super().__init__()
            self.data = quiet_data([{"input_ids": [3, 4, 5 + row]} for row in range(9)], max_tokens=6)
            self.data.trainer = trainer

        def setup(self, stage):
            self.data.setup(stage)

        def train_dataloader(self):
            return {"first": self.data.train_dataloader()}

    class Named(PlainModule):
        def training_step(self, batch, batch_idx):
            seen.append(batch["first"].index)
            return super().training_step(batch["first"], batch_idx)

    options = {"strategy": strategy, "callbacks": [PackedTraining()] if strategy == "auto" else []}
    trainer, seen = quiet_trainer(tmp_path, max_steps=8, **options), []
    with pytest.raises(OptionError, match="without its DataModule"):
        trainer.fit(Named(tiny_llama()), Own(None))
    trainer = quiet_trainer(tmp_path, max_steps=8, **options)
    trainer.fit(Named(tiny_llama()), Own(trainer))
    assert seen == list(range(8))


def test_learns_exactly_what_the_strategy_learns(tmp_path):
    start = tiny_llama().state_dict()
    weights = []
    for options in (
        {"strategy": "fastft"},
        {"strategy": "auto", "callbacks": [PackedTraining(activations=OffloadCheckpointing("recompute"))]},
    ):
        module = PlainModule(tiny_llama())
        module.model.load_state_dict(start)
        quiet_trainer(tmp_path, **options).fit(module, packed_loader())
        weights.append(module.model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in start)


@pytest.mark.parametrize("strategy", ["fastft", "auto"])
def test_a_search_for_a_learning_rate_trains_on_documents_that_are_apart(tmp_path, strategy):
    """It runs before the first batch, among callbacks that were given before ours."""
    contexts = []

    class Module(PlainModule):
        lr = 1e-3

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            contexts.append(batch.context.num_reads)
            return loss

    callbacks = [
        LearningRateFinder(num_training_steps=3, update_attr=False),
        *([PackedTraining()] if strategy == "auto" else []),
    ]
    quiet_trainer(tmp_path, strategy=strategy, callbacks=callbacks, max_steps=1).fit(
        Module(tiny_llama()), packed_loader(4)
    )
    assert len(contexts) > 3
    assert all(contexts)


def test_works_in_ddp_on_one_process(tmp_path):
    callback, module = PackedTraining(), PlainModule(tiny_llama())
    trainer = quiet_trainer(tmp_path, strategy="ddp", callbacks=[callback])
    trainer.fit(module, packed_loader())
    assert trainer.global_step == 3
    assert set(callback.packed_steps.backends_used) == {"sdpa"}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_foreign_attention_is_refused_before_the_backward(tmp_path, accumulate):
    module = PlainModule(ForeignModel())
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ContextError, match="training_step of PlainModule"):
        quiet_trainer(tmp_path, callbacks=[PackedTraining()], accumulate_grad_batches=accumulate).fit(
            module, packed_loader()
        )
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_foreign_evaluation_is_refused(tmp_path):
    for entry in ("validate", "test"):
        with pytest.raises(ContextError):
            getattr(quiet_trainer(tmp_path, callbacks=[PackedTraining()]), entry)(
                PlainModule(ForeignModel()), packed_loader(), verbose=False
            )


def test_validate_and_test_install_by_themselves(tmp_path):
    module = PlainModule(tiny_llama())
    trainer = quiet_trainer(tmp_path, callbacks=[PackedTraining()])
    (validated,) = trainer.validate(module, packed_loader(), verbose=False)
    (tested,) = trainer.test(module, packed_loader(), verbose=False)
    assert validated["val_loss"] == pytest.approx(tested["test_loss"])
    assert type(module.model.lm_head) is torch.nn.Linear


def test_swaps_are_undone_after_an_exception(tmp_path):
    class Fails(PlainModule):
        def on_train_batch_end(self, *args):
            raise RuntimeError("planted")

    module = Fails(tiny_llama())
    with pytest.raises(RuntimeError, match="planted"):
        quiet_trainer(tmp_path, callbacks=[PackedTraining()]).fit(module, packed_loader())
    assert type(module.model.lm_head) is torch.nn.Linear
    assert module.model.config._attn_implementation != "fastft"


def test_redundant_under_our_strategy_and_says_so(tmp_path):
    callback = PackedTraining()
    trainer = quiet_trainer(tmp_path, strategy="fastft", callbacks=[callback])
    trainer.fit(PlainModule(tiny_llama()), packed_loader())
    assert callback.status()[0].state == "inactive"
    assert "PackedTraining" in [status.name for status in trainer.strategy.statuses()]
    assert not callback.packed_steps.is_installed


@pytest.mark.parametrize("options", [{"attention": "reference"}, {"activations": OffloadCheckpointing("recompute")}])
def test_options_that_our_strategy_would_ignore_are_refused(tmp_path, options):
    trainer = quiet_trainer(
        tmp_path, strategy=FastFTStrategy(), accelerator="auto", callbacks=[PackedTraining(**options)]
    )
    with pytest.raises(OptionError, match="to the strategy"):
        trainer.fit(PlainModule(tiny_llama()), packed_loader())


def test_table_is_logged(tmp_path):
    with mock.patch("lightning_fastft.callbacks.packed_training.rank_zero_info") as log:
        quiet_trainer(tmp_path, callbacks=[PackedTraining()]).fit(PlainModule(tiny_llama()), packed_loader())
    assert re.search(r"packed attention +active", log.call_args.args[0])


def test_model_in_evaluation_mode_is_refused_under_recompute(tmp_path):
    callback = PackedTraining(activations=OffloadCheckpointing("recompute"))
    with pytest.raises(OptionError, match=r"\.train\(\)"):
        quiet_trainer(tmp_path, callbacks=[callback]).fit(PlainModule(tiny_llama().eval()), packed_loader())


@pytest.mark.slow
def test_two_ranks_learn_what_one_process_learns(tmp_path):
    run_two_ranks("tests.callbacks.packed_training_worker", tmp_path)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    alone = train_on_one_process(tmp_path)
    for name, expected in alone.items():
        assert torch.equal(first[name], second[name]), name
        # Sums of two ranks and of two micro-batches are rounded in a different order.
        assert torch.linalg.vector_norm(first[name] - expected) <= 1e-4 * torch.linalg.vector_norm(expected), name


@pytest.mark.parametrize("policy", ["offload", "auto"])
def test_the_same_activations_under_a_strategy_that_is_not_ours(tmp_path, policy):
    budgets = {"vram_budget": 1000.0} if policy == "auto" else {}
    callback = PackedTraining(activations=OffloadCheckpointing(policy, host_budget=1.0, **budgets))
    weights = {}
    for name, callbacks in {"plain": [PackedTraining()], policy: [callback]}.items():
        torch.manual_seed(0)
        module = PlainModule(tiny_llama())
        quiet_trainer(tmp_path, callbacks=callbacks, max_steps=6, strategy="auto").fit(module, packed_loader(6))
        weights[name] = [parameter.detach() for parameter in module.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(weights["plain"], weights[policy]))
    reason = callback.packed_steps.activations.status().reason
    assert ("1 layer inputs" if policy == "offload" else "2 of 2 layers kept; predicted") in reason


def packed_data():
    rng = np.random.default_rng(0)
    rows = [{"input_ids": rng.integers(1, VOCAB_SIZE, 9).tolist()} for _ in range(24)]
    return quiet_data(rows, val_paths=rows, test_paths=rows, max_tokens=32)


@pytest.mark.covering
@pytest.mark.parametrize("verb", ["fit", "validate", "test"])
@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_model_that_nobody_prepared_is_refused(tmp_path, strategy, verb):
    module = PlainModule(tiny_llama())
    before = {name: value.clone() for name, value in module.model.state_dict().items()}
    trainer = quiet_trainer(tmp_path, strategy=strategy)
    with pytest.raises(ContextError, match="PackedTraining"):
        getattr(trainer, verb)(module, datamodule=packed_data())
    assert all(torch.equal(before[name], value) for name, value in module.model.state_dict().items())


@pytest.mark.parametrize("how", ["callback", "strategy", "attention of the model"])
def test_model_that_somebody_prepared_is_trained(tmp_path, how):
    module = PlainModule(tiny_llama())
    options = {"callback": {"callbacks": [PackedTraining()]}, "strategy": {"strategy": "fastft"}}.get(how, {})
    if how == "attention of the model":
        lightning_fastft.register()
        module.model.set_attn_implementation("fastft")
    trainer = quiet_trainer(tmp_path, max_steps=2, val_check_interval=1, **options)
    trainer.fit(module, datamodule=packed_data())
    assert trainer.global_step == 2
