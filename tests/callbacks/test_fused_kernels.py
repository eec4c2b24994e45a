"""FusedKernels: installed for each run of any LightningModule, trains what training without it trains, and leaves
nothing behind.
"""

import contextlib
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelCheckpoint
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.callbacks.bincount_router import BincountRouter
from lightning_fastft.callbacks.fused_kernels import FusedKernels
from lightning_fastft.callbacks.packed_training import PackedTraining
from lightning_fastft.core.status import render_status_table
from lightning_fastft.fused import install
from lightning_fastft.strategies.patching import patcher_of
from lightning_fastft.strategies.registry import register_strategies
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.fine_tuner import FineTuner
from tests.callbacks.fused_kernels_worker import BFLOAT16, CASES, NUM_RECORDED_STEPS, RECORDED, train
from tests.strategies.strategy_worker import BOUND, difference
from tests.support.layer_pairs import layers_of
from tests.support.tiny_models import TINY, build_tiny
from tests.support.training_parts import VOCAB_SIZE, PlainModule, packed_batches, packed_loader, quiet_trainer
from tests.support.two_ranks import run_two_ranks

register_strategies()

SIZES = {"hidden_size": 64, "intermediate_size": 128}
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    **SIZES,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "initializer_range": 0.15,
}
MIXTURE = {**CONFIG, "model_type": "qwen3_moe", **TINY["qwen3_moe"][1]}
LORA = {"r": 4, "lora_alpha": 8, "init_lora_weights": False}
EXPERTS = {**LORA, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
MODES = {
    "lora": {"lora": LORA, "dtype": "float32"},
    "full": {"dtype": "float32"},
    "lora in bf16": {"lora": LORA, "dtype": "bfloat16"},
    "qlora": {"lora": LORA, "dtype": "bfloat16", "quantization": "nf4"},
    "full in bf16": {"dtype": "bfloat16"},
}


def tuner(config=CONFIG, *, seed=4, **options):
    torch.manual_seed(seed)
    # Plain SGD: a step is linear in the gradient, so a difference of weights is one of gradients.
    options = {
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.2),
        "scheduler": "constant",
        "warmup_share": 0.0,
        **options,
    }
    return FineTuner(config, init="random", **options)


@contextlib.contextmanager
def count_own(kind=Qwen3Attention):
    """How often the attention layers of transformers ran themselves."""
    calls, real = [], kind.forward

    def counted(*args, **options):
        calls.append(True)
        return real(*args, **options)

    with mock.patch.object(kind, "forward", counted):
        yield calls


def trained(module):
    return {
        name: parameter.detach().clone() for name, parameter in module.named_parameters() if parameter.requires_grad
    }


def fit(module, tmp_path, *callbacks, strategy="fastft", **options):
    """Train three steps between validations; return what is trained before and after, and the table when the
    training began.
    """
    tables, before = [], {}

    def look(trainer, pl_module):
        tables.append(trainer.strategy.statuses() if hasattr(trainer.strategy, "statuses") else [])
        before.update(trained(pl_module))

    callbacks = [*callbacks, LambdaCallback(on_train_start=look)]
    trainer = quiet_trainer(tmp_path, strategy=strategy, callbacks=callbacks, **options)
    trainer.fit(module, packed_loader(3), packed_loader(1, seed=9))
    return before, trained(module), tables[0]


def movement(before, after):
    return {name: after[name].double() - value.double() for name, value in before.items()}


def is_plain(module):
    return not any("Fused" in type(part).__name__ or "fastft_fusion" in vars(part) for part in module.modules())


@pytest.fixture(scope="module")
def rounding_of_bf16(tmp_path_factory):
    """How far three steps in bf16 are from those in fp32, without fused layers."""
    wide, narrow = (
        movement(*fit(tuner(**MODES[mode]), tmp_path_factory.mktemp("plain"))[:2]) for mode in ("lora", "lora in bf16")
    )
    assert difference(narrow, wide) < 0.1
    return difference(narrow, wide)


@pytest.mark.parametrize("mode", MODES)
def test_a_fit_moves_the_weights_as_one_without_it(tmp_path, rounding_of_bf16, mode):
    moves = {}
    for is_fused in (False, True):
        callback, module = FusedKernels(), tuner(**MODES[mode])
        with count_own() as own:
            before, after, table = fit(module, tmp_path, *([callback] if is_fused else []))
        assert (len(own) == 0) is is_fused
        moves[is_fused] = movement(before, after)
        assert is_plain(module)
    assert ("fused layers", "active", "2 layers of qwen3", "") in table
    assert "fused layers" in render_status_table(table)
    assert callback.status()[0].state == "active"
    assert not callback.is_installed
    assert all(value.abs().sum() > 0 for value in moves[False].values())
    assert difference(moves[True], moves[False]) <= (
        1e-5 if MODES[mode]["dtype"] == "float32" else 2 * rounding_of_bf16
    )


@pytest.mark.parametrize("lora", [None, LORA, EXPERTS], ids=["full", "lora", "lora on experts"])
def test_a_mixture_model_trains_with_both_callbacks(tmp_path, lora):
    moves = {}
    for is_fused in (False, True):
        module = tuner(MIXTURE, dtype="float32", **({} if lora is None else {"lora": lora}))
        others = [FusedKernels()] if is_fused else []
        with count_own(Qwen3MoeAttention) as own:
            before, after, table = fit(module, tmp_path, BincountRouter(), *others)
        assert (len(own) == 0) is is_fused
        moves[is_fused] = movement(before, after)
        assert is_plain(module)
    assert {status.name: status.state for status in table}["expert router"] == "active"
    assert ("fused layers", "active", "2 layers of qwen3_moe, feed-forward blocks as modules", "") in table
    assert difference(moves[True], moves[False]) <= 1e-5


@pytest.fixture
def settles_on_cpu(monkeypatch):
    """What runs on a GPU: weights are moved next to their adapters."""
    real = install.fuse_weight_buffers
    monkeypatch.setattr(
        install, "fuse_weight_buffers", lambda root, patcher: real(root, patcher, device_types=("cpu",))
    )


def num_settled(module):
    return sum(parameter.untyped_storage().nbytes() != parameter.nbytes for parameter in module.parameters())


class LookAtWeights(Callback):
    """Write a checkpoint's weights and count those next to their adapters as the run goes on."""

    def __init__(self):
        self.counts, self.saved = {}, []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.counts["batch"] = num_settled(pl_module)

    def on_train_end(self, trainer, pl_module):
        self.counts["end"] = num_settled(pl_module)

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.saved.append(checkpoint)


@pytest.mark.usefixtures("settles_on_cpu")
def test_weights_lie_next_to_their_adapters_while_it_trains_and_checkpoints_hold_them_whole(tmp_path):
    moves = []
    for callbacks in ([], [FusedKernels(), looks := LookAtWeights()]):
        model = get_peft_model(
            build_tiny("qwen3", vocab_size=VOCAB_SIZE, **SIZES), LoraConfig(**LORA, target_modules="all-linear")
        ).train()
        module = PlainModule(model, lr=1e-3)
        options = {
            "enable_checkpointing": True,
            "callbacks": [PackedTraining(), *callbacks, ModelCheckpoint(tmp_path, save_last=True)],
        }
        trainer = quiet_trainer(tmp_path, **options)
        before = trained(module)
        trainer.fit(module, packed_loader(3), packed_loader(1, seed=9))
        moves.append(movement(before, trained(module)))
    assert difference(moves[1], moves[0]) <= 1e-5
    # Of each layer q, k and v, what follows attention, gate and up, and down.
    assert looks.counts == {"batch": 7 * len(layers_of(model)), "end": 0}
    assert "weights next to adapters" in render_status_table(callbacks[0].status())
    (checkpoint, *_) = looks.saved
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in checkpoint["state_dict"].values())
    state = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]
    assert state.keys() == module.state_dict().keys()
    assert all(value.is_contiguous() for value in state.values())
    assert all(torch.equal(state[name], value) for name, value in module.state_dict().items() if "lora" not in name)
    # Nothing else stands in the way of a plain folder.
    model.merge_and_unload().save_pretrained(tmp_path / "merged")


@pytest.mark.usefixtures("settles_on_cpu")
def test_after_an_exception_and_after_a_validation_alone_weights_have_memory_of_their_own(tmp_path):
    model = get_peft_model(
        build_tiny("qwen3", vocab_size=VOCAB_SIZE, **SIZES), LoraConfig(**LORA, target_modules="all-linear")
    ).train()
    module = PlainModule(model)

    def fail(trainer, pl_module, *_):
        assert num_settled(pl_module)
        raise RuntimeError("planted")

    trainer = quiet_trainer(
        tmp_path, callbacks=[PackedTraining(), FusedKernels(), LambdaCallback(on_train_batch_end=fail)]
    )
    with pytest.raises(RuntimeError, match="planted"):
        trainer.fit(module, packed_loader(3))
    assert num_settled(module) == 0
    quiet_trainer(tmp_path, callbacks=[PackedTraining(), FusedKernels()]).validate(
        module, packed_loader(1), verbose=False
    )
    assert num_settled(module) == 0
    assert not any(parameter.is_inference() for parameter in module.parameters())
    assert is_plain(module)


@pytest.mark.parametrize("strategy", ["fastft", "auto"])
def test_any_lightning_module_is_served(tmp_path, strategy):
    moves = {}
    for is_fused in (False, True):
        module = PlainModule(build_tiny("qwen3"))
        module.configure_optimizers = lambda module=module: torch.optim.SGD(module.parameters(), lr=0.1)
        callbacks = [*([] if strategy == "fastft" else [PackedTraining()]), *([FusedKernels()] if is_fused else [])]
        with count_own() as own:
            before, after, _ = fit(module, tmp_path, *callbacks, strategy=strategy)
        assert (len(own) == 0) is is_fused
        moves[is_fused] = movement(before, after)
        assert is_plain(module)
    assert difference(moves[True], moves[False]) <= 1e-5


@pytest.mark.covering
@pytest.mark.parametrize("policy", ["recompute", "offload"])
@pytest.mark.parametrize("mode", ["lora in bf16", "qlora", "full"])
def test_activation_policies_change_no_bit(tmp_path, mode, policy):
    found = {}
    for name in ("keep", policy):
        activations = OffloadCheckpointing(name, **({"host_budget": 1.0} if name == "offload" else {}))
        module = tuner(**MODES[mode])
        with count_own() as own:
            _, found[name], _ = fit(
                module, tmp_path, FusedKernels(), strategy=FastFTStrategy(activations=activations), accelerator="auto"
            )
        assert not own
    assert all(torch.equal(value, found[policy][name]) for name, value in found["keep"].items())


def test_fit_validate_and_test_install_by_themselves_and_a_second_fit_too(tmp_path):
    callback, module = FusedKernels(), tuner(**MODES["qlora"])
    trainer = quiet_trainer(tmp_path, strategy="fastft", callbacks=[callback], max_steps=2)
    runs = {
        "validate": lambda: trainer.validate(module, packed_loader(1), verbose=False),
        "fit": lambda: trainer.fit(module, packed_loader(2)),
        "test": lambda: trainer.test(module, packed_loader(1), verbose=False),
        "fit again": lambda: quiet_trainer(tmp_path, strategy="fastft", callbacks=[FusedKernels()], max_steps=1).fit(
            module, packed_loader(1)
        ),
    }
    for name, run in runs.items():
        with count_own() as own:
            run()
        assert not own, name
        assert is_plain(module), name


@pytest.mark.usefixtures("unprepared_models")
def test_a_tuner_without_narrow_copies_yet_is_served_when_it_has_them():
    """A FineTuner hands its model over before it makes the copies."""
    callback, module = FusedKernels(), tuner(**MODES["lora in bf16"])
    trainer = mock.Mock(callbacks=[callback])
    callback.setup(trainer, module, "fit")
    module.configure_model()
    assert callback.is_installed
    assert callback.status()[0].state == "active"
    with count_own() as own:
        module.model(**packed_batches(1)[0])
    # Attention becomes ours when the run starts.
    assert len(own) == 2
    patcher_of(trainer).undo()
    module.teardown("fit")
    assert is_plain(module)


@pytest.mark.parametrize("mode", ["lora in bf16", "full"])
def test_everything_is_undone_after_an_exception(tmp_path, mode):
    callback, module = FusedKernels(), tuner(**MODES[mode])
    module.on_train_batch_end = mock.Mock(side_effect=RuntimeError("planted"))
    with pytest.raises(RuntimeError, match="planted"):
        quiet_trainer(tmp_path, strategy="fastft", callbacks=[callback]).fit(module, packed_loader())
    assert not callback.is_installed
    assert is_plain(module)


def test_saved_adapters_load_in_stock_peft_with_the_same_logits(tmp_path):
    build_tiny("qwen3").save_pretrained(tmp_path / "base")
    module = FineTuner(str(tmp_path / "base"), learning_rate=1e-2, **MODES["lora"])
    saved = LambdaCallback(on_train_end=lambda trainer, pl_module: pl_module.save_pretrained(tmp_path / "adapters"))
    fit(module, tmp_path, FusedKernels(), saved)
    stock = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapters"
    ).eval()
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        found, expected = module.model.eval()(input_ids=ids).logits, stock(input_ids=ids).logits
        assert (expected - AutoModelForCausalLM.from_pretrained(tmp_path / "base")(input_ids=ids).logits).norm() > 1e-3
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_what_is_not_served_is_left_alone_and_the_table_says_so(tmp_path):
    _, _, table = fit(PlainModule(build_tiny("olmoe")), tmp_path, FusedKernels())
    found = {status.name: status for status in table}["fused layers"]
    assert found.state == "inactive"
    assert found.reason.startswith("OlmoeDecoderLayer is not supported")


def test_an_obstacle_is_in_the_table_and_the_run_goes_on(tmp_path):
    module = tuner(dtype="float32", lora={**LORA, "lora_dropout": 0.1})
    with count_own() as own:
        _, _, table = fit(module, tmp_path, FusedKernels())
    found = {status.name: status for status in table}["fused layers"]
    assert found.state == "refused"
    assert found.reason == "2 of 2 layers: the adapter has dropout"
    assert found.remedy
    assert own


def test_adapters_of_peft_in_float32_on_a_model_in_bfloat16_are_told_how_to_fuse(tmp_path):
    model = get_peft_model(build_tiny("qwen3").bfloat16(), LoraConfig(**LORA, target_modules=["q_proj"]))
    _, _, table = fit(PlainModule(model.train()), tmp_path, FusedKernels())
    found = {status.name: status for status in table}["fused layers"]
    assert found.state == "refused"
    assert "autocast_adapter_dtype=False" in found.remedy


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fused")
    run_two_ranks("tests.callbacks.fused_kernels_worker", folder)
    return torch.load(folder / "found.pt", weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_equal_one_process(two_ranks, case):
    found = two_ranks[case]
    assert found["status"] == [("fused layers", "active", "2 layers of qwen3", "")]
    assert found["own"] == 0
    assert difference(found["state"], train("one", *case[1:], is_fused=False)["state"]) <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize("case", BFLOAT16, ids=str)
def test_two_ranks_serve_bf16_with_fp32_adapters(two_ranks, case):
    found = two_ranks[(*case, "bfloat16")]
    assert found["own"] == 0
    expected = train("one", case[1], "keep", dtype="bfloat16")
    assert difference(found["state"], expected["state"]) <= 2e-2


@pytest.mark.slow
@pytest.mark.parametrize("case", RECORDED, ids=str)
def test_ranks_whose_layers_are_recorded_equal_one_process(two_ranks, case):
    found = two_ranks[("recorded", *case)]
    # Two layers, in every micro-batch but two: the shorter packs run from the recordings of the longer ones.
    assert found["replays"] == 2 * (2 * NUM_RECORDED_STEPS - 2)
    assert found["status"][:2] == ("layer graphs", "active")
    expected = train("one", *case[:2], is_fused=False, max_steps=NUM_RECORDED_STEPS)
    assert difference(found["state"], expected["state"]) <= BOUND
