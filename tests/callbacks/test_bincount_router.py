"""BincountRouter: installed for each run of any LightningModule, seen in the table, taken back; what cannot be
served is an error.
"""

import os
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.callbacks.bincount_router import BincountRouter
from lightning_fastft.callbacks.packed_training import PackedTraining
from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.core.status import render_status_table
from lightning_fastft.moe.install import find_experts
from lightning_fastft.strategies.patching import patcher_of
from lightning_fastft.strategies.registry import register_strategies
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.fine_tuner import FineTuner
from tests.moe.test_install import CountedCore, distance
from tests.support.sizes import tiny_qwen3
from tests.support.tiny_models import TINY, build_tiny
from tests.support.training_parts import VOCAB_SIZE, PlainModule, packed_loader, quiet_trainer, tiny_llama

register_strategies()

CONFIG = tiny_qwen3(
    model_type="qwen3_moe",
    vocab=VOCAB_SIZE,
    inner=40,
    tie_word_embeddings=False,
    eos_token_id=2,
    **TINY["qwen3_moe"][1],
)
ACTIVE = "2 MoE layers (4 experts, 2 per token), qwen3_moe; grouped GEMM: reference"


class LazyModule(PlainModule):
    def __init__(self):
        super().__init__(None)

    def configure_model(self):
        if self.model is None:
            self.model = build_tiny("qwen3_moe")


def tuner(**options):
    return FineTuner(CONFIG, **{"init": "random", "dtype": "float32", "learning_rate": 1e-2, **options})


def is_plain(module):
    """Whether every mixture layer is as transformers left it."""
    return all(layer.config._experts_implementation != "fastft" for _, layer in find_experts(module))


MODULES = {
    "eager": lambda: PlainModule(build_tiny("qwen3_moe")),
    "lazy": LazyModule,
    "tuner": tuner,
    "tuner with a model": lambda: FineTuner(build_tiny("qwen3_moe"), dtype="float32", learning_rate=1e-2),
    "lora": lambda: tuner(lora={"r": 4}),
    "lora on experts": lambda: tuner(
        lora={"r": 4, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    ),
}


@pytest.mark.covering
@pytest.mark.parametrize("strategy", ["fastft", "auto"])
@pytest.mark.parametrize("kind", MODULES)
def test_trains_and_leaves_the_model_as_it_was(tmp_path, kind, strategy):
    callback, module = BincountRouter(), MODULES[kind]()
    others = [] if strategy == "fastft" else [PackedTraining()]
    trainer = quiet_trainer(tmp_path, strategy=strategy, callbacks=[*others, callback])
    with CountedCore() as core:
        trainer.fit(module, packed_loader(3), packed_loader(1, seed=9))
    # Two layers, three steps and the validation before and after them.
    assert trainer.global_step == 3
    assert len(core.calls) >= 2 * 4
    if strategy == "auto":
        assert type(trainer.strategy) is SingleDeviceStrategy
    adapted = "; adapters on 4 stacks" if kind == "lora on experts" else ""
    assert [status.reason for status in callback.status()] == [ACTIVE + adapted]
    assert not callback.is_installed
    assert is_plain(module)


def test_learns_what_training_without_it_learns(tmp_path):
    weights = {}
    for name, callbacks in {"plain": [], "routed": [BincountRouter()]}.items():
        torch.manual_seed(0)
        module = PlainModule(build_tiny("mixtral", experts="eager"), lr=1e-3)
        module.configure_optimizers = lambda module=module: torch.optim.SGD(module.parameters(), lr=1e-2)
        quiet_trainer(tmp_path, strategy="fastft", callbacks=callbacks).fit(module, packed_loader())
        weights[name] = module.model.state_dict()
    assert list(weights["plain"]) == list(weights["routed"])
    assert all(distance(weights["routed"][key], value) <= 1e-6 for key, value in weights["plain"].items())


@pytest.mark.parametrize("kind", ["eager", "tuner", "lora on experts"])
def test_fit_validate_and_test_install_by_themselves(tmp_path, kind):
    callback, module = BincountRouter(), MODULES[kind]()
    trainer = quiet_trainer(tmp_path, strategy="fastft", callbacks=[callback], max_steps=2)
    runs = {
        "validate": lambda: trainer.validate(module, packed_loader(), verbose=False),
        "fit": lambda: trainer.fit(module, packed_loader()),
        "test": lambda: trainer.test(module, packed_loader(), verbose=False),
        "fit again": lambda: quiet_trainer(tmp_path, strategy="fastft", callbacks=[callback], max_steps=1).fit(
            module, packed_loader()
        ),
    }
    for name, run in runs.items():
        with CountedCore() as core:
            run()
        assert core.calls, name
        assert is_plain(module), name


def test_a_quantised_tuner_trains_adapters_on_experts_in_nf4(tmp_path):
    lora = {
        "r": 4,
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }
    callback, module = BincountRouter(), tuner(lora=lora, quantization="nf4")
    trainer = quiet_trainer(tmp_path, strategy="fastft", callbacks=[callback], max_steps=2)
    found = []
    trainer.callbacks.append(
        LambdaCallback(on_train_start=lambda trainer, _: found.extend(trainer.strategy.statuses()))
    )
    trainer.fit(module, packed_loader(2))
    states = {status.name: status for status in found}
    assert states["NF4 experts"].state == states["expert router"].state == "active"
    assert states["NF4 experts"].reason.startswith("4 stacks")
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert any("experts" in name for name in trained)
    assert all(parameter.grad is None or torch.isfinite(parameter.grad).all() for parameter in trained.values())


def test_a_tuner_that_stands_is_served_by_a_later_callback(tmp_path):
    module = tuner()
    quiet_trainer(tmp_path, strategy="fastft", max_steps=1).fit(module, packed_loader())
    with CountedCore() as core:
        quiet_trainer(tmp_path, strategy="fastft", callbacks=[BincountRouter()], max_steps=1).fit(
            module, packed_loader()
        )
    assert core.calls
    assert is_plain(module)


def test_a_tuner_is_swapped_while_it_builds_its_model():
    callback, module = BincountRouter(), tuner(lora={"r": 4})
    trainer = mock.Mock(callbacks=[callback])
    callback.setup(trainer, module, "fit")
    module.configure_model()
    assert callback.is_installed
    assert not is_plain(module)
    patcher_of(trainer).undo()
    assert not callback.is_installed
    assert is_plain(module)


@pytest.mark.covering
@pytest.mark.parametrize("kind", ["eager", "lora on experts"])
@pytest.mark.parametrize("policy", ["recompute", "offload"])
def test_activation_policies_change_nothing(tmp_path, kind, policy):
    weights = {}
    for name, options in {
        "plain": {},
        policy: {"activations": OffloadCheckpointing(policy, **({"host_budget": 1.0} if policy == "offload" else {}))},
    }.items():
        torch.manual_seed(0)
        module = MODULES[kind]()
        quiet_trainer(
            tmp_path, strategy=FastFTStrategy(**options), accelerator="auto", callbacks=[BincountRouter()]
        ).fit(module, packed_loader())
        weights[name] = {key: value.detach() for key, value in module.named_parameters()}
    assert all(torch.equal(weights["plain"][key], value) for key, value in weights[policy].items())


def test_a_run_that_ended_before_its_model_was_built_leaves_nothing_to_the_next(tmp_path):
    module, first, second = tuner(), BincountRouter(), BincountRouter()
    with (
        mock.patch("lightning_fastft.training.model.causal_lm.open_source", side_effect=RuntimeError("planted")),
        pytest.raises(RuntimeError, match="planted"),
    ):
        quiet_trainer(tmp_path, strategy="fastft", callbacks=[first]).fit(module, packed_loader())
    quiet_trainer(tmp_path, strategy="fastft", callbacks=[second]).fit(module, packed_loader())
    assert not first.is_installed
    assert second.status()[0].state == "active"
    assert is_plain(module)


def test_llama4_is_swapped_and_taken_back(tmp_path):
    class Padded(PlainModule):
        def training_step(self, batch, batch_idx):
            return self.model(input_ids=batch, labels=batch).loss

    callback, module = BincountRouter(), Padded(build_tiny("llama4_text"))
    before = {name: type(part) for name, part in module.named_modules()}
    batches = torch.utils.data.DataLoader(torch.randint(3, VOCAB_SIZE, (6, 9)), batch_size=2)
    with CountedCore() as core:
        quiet_trainer(tmp_path, strategy="auto", callbacks=[callback]).fit(module, batches)
    assert len(core.calls) == 6
    assert {name: type(part) for name, part in module.named_modules()} == before


@pytest.mark.parametrize("kind", ["eager", "tuner", "lora on experts"])
def test_swaps_are_undone_after_an_exception(tmp_path, kind):
    callback, module = BincountRouter(), MODULES[kind]()
    module.on_train_batch_end = mock.Mock(side_effect=RuntimeError("planted"))
    with pytest.raises(RuntimeError, match="planted"):
        quiet_trainer(tmp_path, strategy="fastft", callbacks=[callback]).fit(module, packed_loader())
    assert not callback.is_installed
    assert is_plain(module)


def test_a_dense_model_is_left_alone_and_the_table_says_so(tmp_path):
    callback = BincountRouter()
    trainer = quiet_trainer(tmp_path, strategy="fastft", callbacks=[callback])
    trainer.fit(PlainModule(tiny_llama()), packed_loader())
    assert callback.status()[0].state == "inactive"
    assert "expert router     inactive  no MoE layers in LlamaForCausalLM (llama)" in render_status_table(
        trainer.strategy.statuses()
    )


def test_the_table_of_the_strategy_holds_the_status(tmp_path):
    trainer = quiet_trainer(tmp_path, strategy="fastft", callbacks=[BincountRouter()])
    trainer.fit(PlainModule(build_tiny("qwen3_moe")), packed_loader())
    assert ("expert router", "active", ACTIVE, "") in trainer.strategy.statuses()


@pytest.mark.parametrize("kind", ["plain", "tuner"])
def test_experts_that_are_not_known_are_an_error_and_nothing_stays(tmp_path, kind):
    model = AutoModelForCausalLM.from_config(build_tiny("qwen3_moe", hidden_act="mish").config)
    module = PlainModule(model) if kind == "plain" else FineTuner(model, dtype="float32", learning_rate=1e-2)
    callback = BincountRouter()
    with pytest.raises(
        UnsupportedModelError,
        match=r"Qwen3MoeForCausalLM \(qwen3_moe\), model.layers.0.mlp.experts: the activation Mish",
    ):
        quiet_trainer(tmp_path, strategy="fastft", callbacks=[callback]).fit(module, packed_loader())
    assert not callback.is_installed
    assert is_plain(module)


@pytest.mark.parametrize("when", ["before", "after"])
def test_sharded_experts_are_gathered_for_each_call(when, tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    callback, module = BincountRouter(), PlainModule(build_tiny("qwen3_moe"))
    trainer = mock.Mock(callbacks=[callback])
    ids = torch.arange(9)[None]
    truth = module.model(ids).logits
    callback.setup(trainer, module, "fit")
    if when == "after":
        callback._transform(module)
    for layer in (*module.model.model.layers, module.model):
        fully_shard(layer, mesh=mesh)
    callback.on_fit_start(trainer, module)
    assert distance(module.model(ids).logits, truth) <= 1e-5
    module.model.model.layers[0].reshard()
    with pytest.raises(UnsupportedModelError, match=r"Qwen3MoeExperts\.gate_up_proj is a DTensor"):
        module.model.model.layers[0].mlp.experts(
            torch.ones(1, 32), torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2)
        )
    patcher_of(trainer).undo()
    assert is_plain(module)


def test_a_tuner_under_fsdp_is_served(tmp_path):
    module = tuner()
    with mock.patch.dict(os.environ, {"MASTER_ADDR": "127.0.0.1"}):
        trainer = quiet_trainer(tmp_path, strategy="fastft_fsdp", callbacks=[BincountRouter()])
        trainer.fit(module, packed_loader())
    assert ("expert router", "active") in {status[:2] for status in trainer.strategy.statuses()}


def test_before_a_run_the_status_says_so():
    assert BincountRouter().status()[0].reason == "not installed"
