"""FastFTStrategyMixin: ranks follow rank 0 (its seed, its paths, its plan), process groups are destroyed before the
interpreter ends, and a checkpoint is read without a module.
"""

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from peft import LoraConfig

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.checkpoint import ranks
from lightning_fastft.checkpoint.files import find_damage
from lightning_fastft.checkpoint.stops import RunStopped
from lightning_fastft.strategies import mixin
from lightning_fastft.strategies.ddp import FastFTDDPStrategy
from lightning_fastft.strategies.fsdp2 import FastFTFSDPStrategy
from lightning_fastft.strategies.packed_steps import environment_of
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.fine_tuner import FineTuner
from lightning_fastft.training.model.construction import find_home
from tests.checkpoint.test_folder_writer import gate  # noqa: F401
from tests.strategies.test_model_after_run import RaiseAt
from tests.support.token_weighting_worker import CONFIG
from tests.support.training_parts import VOCAB_SIZE, PlainModule, packed_loader, quiet_trainer, tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning.*")


def on_another_rank(strategy, of_rank_zero):
    """Let a strategy give what rank 0 has, for what this rank has."""
    strategy.broadcast = lambda value, src=0: of_rank_zero.get(value, value)
    return strategy


def weights_from_seed(folder, seed, strategy):
    torch.manual_seed(seed)
    tuner = FineTuner(
        {**CONFIG, "vocab_size": VOCAB_SIZE}, init="random", dtype="float32", lora={"r": 2}, scheduler="constant"
    )
    quiet_trainer(folder, strategy=strategy, max_steps=1).fit(tuner, packed_loader(1))
    return tuner.model.state_dict()


def test_random_weights_and_adapters_come_from_the_seed_of_rank_zero(tmp_path):
    truth = weights_from_seed(tmp_path, 7, FastFTStrategy())
    found = weights_from_seed(tmp_path, 8, on_another_rank(FastFTStrategy(), {8: 7}))
    assert all(torch.equal(found[name], value) for name, value in truth.items())


@pytest.mark.parametrize(("weights", "place"), [("stream", "cpu"), ("auto", "meta"), ("resident", "meta")])
def test_a_model_is_built_on_the_host_if_its_weights_are_streamed(weights, place):
    strategy = FastFTStrategy(activations=OffloadCheckpointing(weights=weights))
    strategy.parallel_devices = [torch.device("meta")]
    with strategy.tensor_init_context():
        assert torch.empty(1).device.type == place
    trainer = SimpleNamespace(strategy=strategy)
    module = SimpleNamespace(_trainer=trainer, trainer=trainer)
    assert find_home(module, lora=LoraConfig()).type == place
    # Adapters that are computed from the base need it on the device.
    assert find_home(module, lora=LoraConfig(use_dora=True)).type == "meta"


@pytest.mark.parametrize(
    ("budget", "is_given", "is_streamed"), [(1.0, False, False), (1e-5, False, True), (1e-5, True, True)]
)
def test_a_model_larger_than_the_budget_is_streamed_from_the_start(
    budget, is_given, is_streamed, tmp_path, monkeypatch
):
    config = {**CONFIG, "vocab_size": VOCAB_SIZE}
    made = {} if is_given else {"init": "random", "dtype": "float32"}
    tuner = FineTuner(tiny_llama() if is_given else config, lora={"r": 2}, **made)
    checkpointing = OffloadCheckpointing("auto", vram_budget=budget, host_budget=1)
    strategy = FastFTStrategy(activations=checkpointing)
    asked = []
    of_model = strategy.stream_if_larger

    def ask(model_bytes):
        # The policy decides so for GPUs only.
        with mock.patch.object(type(strategy), "root_device", torch.device("cuda")):
            of_model(model_bytes)
        asked.append((model_bytes(0), checkpointing.options.weights))

    monkeypatch.setattr(strategy, "stream_if_larger", ask)
    monkeypatch.setattr(mixin, "is_unified", lambda device: False)
    trainer = quiet_trainer(tmp_path, strategy=strategy, max_steps=1)
    trainer.fit(tuner, packed_loader(1))
    assert checkpointing.options.weights == "auto"
    # A model that is built is on the host again after a run.
    trainer.validate(tuner, packed_loader(1), verbose=False)
    num_bytes = [
        sum(item.nbytes for name, item in tuner.model.named_parameters() if is_whole or "lora_" not in name)
        for is_whole in (False, True)
    ]
    assert asked == [(size, "stream" if is_streamed else "auto") for size in num_bytes]
    assert checkpointing.options.weights == "auto"


STRATEGIES = {
    "fastft": FastFTStrategy,
    "fastft_fsdp, a file": lambda: FastFTFSDPStrategy(save_distributed_checkpoint=False),
    "fastft_fsdp, a folder": FastFTFSDPStrategy,
}


class Built(PlainModule):
    """Builds its model where sharded training needs it."""

    def __init__(self):
        super().__init__(None)

    def configure_model(self):
        self.model = self.model or tiny_llama()


def fit_on_another_rank(folder, name, **run):
    """Two steps of a run in which rank 0 has another checkpoint path."""
    own, right = folder / "own.ckpt", folder / "right.ckpt"
    strategy = on_another_rank(STRATEGIES[name](), {own: right, str(own): str(right)})
    trainer = quiet_trainer(folder, strategy=strategy, use_distributed_sampler=False, max_steps=2)
    trainer.fit(Built(), packed_loader(4), **run)
    return trainer


@pytest.mark.parametrize("name", STRATEGIES)
def test_checkpoints_are_loaded_from_the_path_of_rank_zero(tmp_path, name):
    fit_on_another_rank(tmp_path, name).save_checkpoint(tmp_path / "right.ckpt")
    assert fit_on_another_rank(tmp_path, name, ckpt_path=str(tmp_path / "own.ckpt")).global_step == 2


@pytest.mark.parametrize("name", [name for name in STRATEGIES if "fsdp" in name])
def test_checkpoints_that_all_ranks_write_go_to_the_path_of_rank_zero(tmp_path, name):
    fit_on_another_rank(tmp_path, name).save_checkpoint(tmp_path / "own.ckpt")
    assert [place.name for place in tmp_path.iterdir() if place.suffix == ".ckpt"] == ["right.ckpt"]


def test_a_save_after_a_fit_is_complete_when_it_returns(tmp_path, gate):  # noqa: F811
    """No step follows that a save in the background would not hold, and nothing waits for one."""
    fit_on_another_rank(tmp_path, "fastft_fsdp, a folder").save_checkpoint(tmp_path / "right.ckpt")
    damage = find_damage(tmp_path / "right.ckpt")
    gate.set()
    assert damage is None


def test_a_checkpoint_is_read_without_a_module(tmp_path):
    strategy = FastFTStrategy()
    strategy.checkpoint_io.save_checkpoint({"epoch": 3}, tmp_path / "a.ckpt")
    assert strategy.load_checkpoint(tmp_path / "a.ckpt") == {"epoch": 3}


def test_plans_are_agreed_on_by_the_strategy(tmp_path):
    trainer = quiet_trainer(tmp_path, strategy=on_another_rank(FastFTStrategy(), {"own plan": "plan of rank 0"}))
    assert environment_of(trainer).agree("own plan") == "plan of rank 0"


class Exits:
    """The calls that Python makes when the interpreter ends, in place of the module atexit."""

    def __init__(self):
        self.registered = []

    def register(self, function):
        self.registered.append(function)

    def unregister(self, function):
        self.registered = [other for other in self.registered if other != function]


@pytest.mark.parametrize(
    ("error", "is_left"), [(None, False), (RunStopped(15, step=1, path="a.ckpt"), False), (ValueError(), True)]
)
def test_process_groups_are_destroyed_at_exit_unless_a_rank_failed(tmp_path, monkeypatch, error, is_left):
    """A rank that failed must not wait for collectives that others have not joined."""
    monkeypatch.setattr(ranks, "atexit", exits := Exits())
    callbacks = [] if error is None else [RaiseAt("on_train_batch_end", error)]
    trainer = quiet_trainer(tmp_path, strategy=FastFTDDPStrategy(), callbacks=callbacks, max_steps=1)
    with contextlib.nullcontext() if error is None else pytest.raises(type(error)):
        trainer.fit(PlainModule(tiny_llama()), packed_loader(1))
    assert torch.distributed.is_initialized()
    for function in exits.registered:
        function()
    assert torch.distributed.is_initialized() == is_left
