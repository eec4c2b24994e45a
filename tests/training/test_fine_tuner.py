"""FineTuner: full, LoRA and QLoRA runs train, evaluate, resume, save and generate; what cannot be served as asked
is refused by name.
"""

import copy
import itertools
import json
from unittest import mock

import fsspec
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from lightning_fastft.callbacks.packed_training import PackedTraining
from lightning_fastft.core.errors import (
    ContextError,
    DamagedCheckpointError,
    DataError,
    OptionError,
    ResumeError,
    SwapError,
)
from lightning_fastft.packing.collate import collate
from lightning_fastft.strategies.registry import register_strategies
from lightning_fastft.training.datamodule import PackedDataModule
from lightning_fastft.training.fine_tuner import FineTuner
from lightning_fastft.training.optimizer import FusedAdamW
from tests.support.host_waits import HostWaits
from tests.support.training_parts import VOCAB_SIZE, packed_batches, packed_loader, quiet_trainer

register_strategies()

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
LORA = {"r": 4, "lora_alpha": 8}
MODES = {
    "full": {"dtype": "float32"},
    "lora": {"dtype": "float32", "lora": LORA},
    "lora_bf16": {"dtype": "bfloat16", "lora": LORA},
    "qlora": {"dtype": "bfloat16", "lora": LORA, "quantization": "nf4"},
}


def tuner(mode="lora", **options):
    return FineTuner(CONFIG, init="random", **{"learning_rate": 1e-2, **MODES[mode], **options})


def trainable(module):
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def fit(module, tmp_path, *, num_batches=4, **options):
    trainer = quiet_trainer(tmp_path, **{"strategy": "fastft", **options})
    trainer.fit(module, packed_loader(num_batches))
    return trainer


def word_tokenizer(template=False):
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{index}": index for index in range(3, VOCAB_SIZE)}}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>")
    if template:
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w9{% endif %}"
        )
    return tokenizer


# Training.


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_learns_its_data(tmp_path, mode):
    module = tuner(mode)
    trainer = quiet_trainer(tmp_path, strategy="fastft", max_steps=30)
    loader = packed_loader(3)
    before = trainer.validate(module, loader, verbose=False)[0]
    start = {name: parameter.clone() for name, parameter in trainable(module).items()}
    trainer.fit(module, loader)
    after = trainer.validate(module, loader, verbose=False)[0]
    assert after["val_loss"] < before["val_loss"] - 0.5
    assert after["val_token_accuracy"] > before["val_token_accuracy"]
    assert all(not torch.equal(start[name], parameter) for name, parameter in trainable(module).items())
    expected = torch.float32
    assert {parameter.dtype for parameter in trainable(module).values()} == {expected}
    assert all(("lora_" in name) == (mode != "full") for name in trainable(module))


def test_train_loss_is_the_mean_over_the_labelled_tokens_of_its_batch(tmp_path):
    batches = packed_batches(2, num_items=1000.0)
    module = tuner()
    trainer = quiet_trainer(tmp_path, strategy="fastft", max_steps=1)
    trainer.fit(module, DataLoader(batches, batch_size=None))
    fresh = tuner()
    fresh._seed = module._seed
    truth = quiet_trainer(tmp_path, strategy="fastft").validate(
        fresh, DataLoader(batches[:1], batch_size=None), verbose=False
    )[0]["val_loss"]
    # The fresh adapters are 0 at B, as those of the first step were.
    assert float(trainer.callback_metrics["train_loss"]) == pytest.approx(truth, rel=1e-5)


@pytest.mark.parametrize("mode", ["full", "lora_bf16"])
def test_training_step_never_waits_for_the_device(tmp_path, mode):
    counts = []

    class Counted(FineTuner):
        def training_step(self, batch, batch_idx):
            with HostWaits() as waits:
                loss = super().training_step(batch, batch_idx)
            counts.append(waits.total)
            return loss

    fit(Counted(CONFIG, init="random", **MODES[mode]), tmp_path)
    assert counts == [0, 0, 0]
    with HostWaits() as waits:
        torch.ones(1).item()
    assert waits.total == 1


@pytest.mark.parametrize("strategy", ["fastft", "auto"])
def test_copies_follow_their_masters_under_any_strategy_and_leave_a_plain_model(tmp_path, strategy):
    seen = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            for name, module in pl_module.model.named_modules():
                low_copy = vars(module).get("fastft_copy")
                if low_copy is not None:
                    seen.append(name)
                    assert torch.equal(low_copy.tensor, module.weight.to(torch.bfloat16)), name

    module = tuner("lora_bf16")
    callbacks = [Watch()] if strategy == "fastft" else [Watch(), PackedTraining()]
    trainer = fit(module, tmp_path, strategy=strategy, callbacks=callbacks)
    assert trainer.global_step == 3
    assert len(seen) == 3 * 2 * 7 * 2
    assert {type(layer).__module__ for layer in module.model.modules() if hasattr(layer, "lora_A")} == {
        "peft.tuners.lora.layer"
    }
    assert module.low_precision_adapters is None


def test_adapters_in_bf16_are_served_as_asked(tmp_path):
    for precision in ("32-true", "bf16-true"):
        module = tuner("lora_bf16", adapter_dtype="bfloat16")
        trainer = fit(module, tmp_path, precision=precision)
        assert trainer.global_step == 3
        assert {parameter.dtype for parameter in module.model.parameters()} == {torch.bfloat16}


def test_packed_batch_is_refused_where_no_attention_reads_it(tmp_path):
    with pytest.raises(ContextError, match="PackedTraining"):
        fit(tuner(), tmp_path, strategy="auto")
    with pytest.raises(ContextError, match="fastft"):
        quiet_trainer(tmp_path).validate(tuner(), packed_loader(1), verbose=False)


def test_plain_batches_train_under_a_plain_strategy(tmp_path):
    ids = torch.randint(3, VOCAB_SIZE, (4, 2, 9))
    batches = [{"input_ids": row, "labels": row.clone()} for row in ids]
    trainer = quiet_trainer(tmp_path, max_steps=2)
    trainer.fit(tuner(), DataLoader(batches, batch_size=None))
    assert trainer.global_step == 2
    with pytest.raises(DataError, match="labels"):
        quiet_trainer(tmp_path).fit(tuner(), DataLoader([{"input_ids": ids[0]}], batch_size=None))


# Evaluation.


def direct_numbers(model, batches):
    """Loss, perplexity and accuracy from full logits of each document alone."""
    nll, hits, count = 0.0, 0, 0
    with torch.no_grad():
        for batch in batches:
            offsets = batch.context.start_host_S1.tolist()
            for start, end in itertools.pairwise(offsets):
                ids, labels = batch["input_ids"][:, start:end], batch["labels"][0, start + 1 : end]
                logits = model(input_ids=ids).logits[0, :-1].double()[labels != -100]
                labels = labels[labels != -100]
                nll += float(nn.functional.cross_entropy(logits, labels, reduction="sum"))
                hits += int((logits.argmax(-1) == labels).sum())
                count += labels.numel()
    return {"loss": nll / count, "perplexity": float(torch.tensor(nll / count).exp()), "token_accuracy": hits / count}


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_evaluation_equals_full_logits_of_single_documents(tmp_path, mode):
    module = tuner(mode)
    trainer = fit(module, tmp_path)
    batches = packed_batches(3, seed=40)
    with mock.patch(
        "lightning_fastft.training.fine_tuner.logits_statistics", side_effect=AssertionError("full logits were made")
    ):
        loaders = [DataLoader(batches, batch_size=None), DataLoader(batches[1:], batch_size=None)]
        validated = trainer.validate(module, loaders, verbose=False)
        tested = trainer.test(module, loaders[0], verbose=False)
    truth, other = direct_numbers(module.model.eval(), batches), direct_numbers(module.model, batches[1:])
    for name, value in truth.items():
        assert validated[0][f"val_{name}/dataloader_idx_0"] == pytest.approx(value, rel=1e-5)
        assert validated[1][f"val_{name}/dataloader_idx_1"] == pytest.approx(other[name], rel=1e-5)
        assert tested[0][f"test_{name}"] == pytest.approx(value, rel=1e-5)


def test_evaluation_falls_back_to_real_logits(tmp_path):
    module = tuner()
    batches = packed_batches(2, seed=40)
    for batch in batches:
        batch.context.output_logits = True
    found = quiet_trainer(tmp_path, strategy="fastft").validate(
        module, DataLoader(batches, batch_size=None), verbose=False
    )[0]
    for name, value in direct_numbers(module.model.eval(), batches).items():
        assert found[f"val_{name}"] == pytest.approx(value, rel=1e-5)


# Building.


def test_model_is_built_once_over_fit_validate_and_test(tmp_path):
    calls = []
    module = tuner("lora_bf16")
    module.register_transform("count", lambda model: calls.append(type(model).__name__))
    trainer = quiet_trainer(tmp_path, strategy="fastft")
    trainer.fit(module, packed_loader(3))
    parameters = {name: id(parameter) for name, parameter in module.named_parameters()}
    model = module.model
    trainer.validate(module, packed_loader(1), verbose=False)
    quiet_trainer(tmp_path, strategy="fastft").test(module, packed_loader(1), verbose=False)
    quiet_trainer(tmp_path, strategy="fastft").fit(module, packed_loader(3))
    assert module.model is model
    assert {name: id(parameter) for name, parameter in module.named_parameters()} == parameters
    assert calls == ["Qwen3ForCausalLM"]
    assert model.training


def test_base_and_adapters_follow_the_seed_of_the_run():
    weights = []
    for seed, draws in ((1, 0), (1, 3), (2, 0)):
        seed_everything(seed, verbose=False)
        torch.rand(draws)
        module = tuner()
        module.configure_model()
        weights.append(dict(module.named_parameters()))
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name
        # Norms and the B of LoRA start as constants.
        assert torch.equal(value, weights[2][name]) == ("norm" in name or "lora_B" in name), name


def test_transforms_run_in_their_stage_and_what_they_add_is_trained(tmp_path):
    seen = []

    class Adds(Callback):
        def setup(self, trainer, pl_module, stage):
            pl_module.register_transform("late", self.late, stage="after_adapters")
            pl_module.register_transform("early", self.early, stage="before_adapters")

        def early(self, model):
            seen.append(("early", type(model).__name__))
            model = copy.deepcopy(model)
            model.model.layers[0].mlp.act_fn = Scaled()
            return model

        def late(self, model):
            seen.append(("late", type(model).__name__))
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(parameter.requires_grad or "gain" in name)

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return nn.functional.silu(x) * self.gain

    module = tuner()
    optimizers = []
    with mock.patch.object(FineTuner, "_make_optimizer", autospec=True, side_effect=FineTuner._make_optimizer) as make:
        trainer = quiet_trainer(tmp_path, strategy="fastft", callbacks=[Adds()])
        trainer.fit(module, packed_loader(3))
        trainer.validate(module, packed_loader(1), verbose=False)
        optimizers = make.call_args_list
    assert seen == [("early", "Qwen3ForCausalLM"), ("late", "PeftModelForCausalLM")]
    assert len(optimizers) == 1
    gain = next(parameter for name, parameter in module.named_parameters() if "gain" in name)
    assert float(gain.detach()) != 1.0
    with pytest.raises(SwapError, match="too late"):
        module.register_transform("another", lambda model: model)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weight_decay", [None, 0.1])
def test_optimizer_holds_every_live_trainable_parameter_once(tmp_path, mode, weight_decay):
    module = tuner(mode, weight_decay=weight_decay)
    trainer = fit(module, tmp_path)
    held = [id(parameter) for group in trainer.optimizers[0].param_groups for parameter in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in trainable(module).values())
    assert held


def test_model_given_is_used_as_it_is(tmp_path):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))
    modes = []

    class Watch(FineTuner):
        def training_step(self, batch, batch_idx):
            modes.append(self.model.training and self.model.model.layers[0].training)
            return super().training_step(batch, batch_idx)

    # transformers hands models over in evaluation mode.
    module = Watch(model.eval(), learning_rate=1e-2)
    fit(module, tmp_path)
    assert modes == [True] * 3
    assert module.model is model
    assert len(module.state_dict()) > 20

    module = FineTuner(copy.deepcopy(model), lora=LORA)
    fit(module, tmp_path)
    assert isinstance(module.model, PeftModel)

    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(target_modules=["q_proj"]))
    module = FineTuner(adapted)
    fit(module, tmp_path)
    assert module.model is adapted
    assert len(module.state_dict()) == 4


@pytest.mark.parametrize(
    ("is_adapted", "options", "trainer", "word"),
    [
        (False, {"quantization": "nf4", "lora": LORA}, {}, "loaded already"),
        (True, {"lora": LORA}, {}, "adapters already"),
        (True, {"master_dtype": "float32"}, {}, "adapter_dtype"),
        (False, {"dtype": "bfloat16"}, {}, "model has float32"),
        (False, {}, {"precision": "bf16-true"}, "dtype='float32' to bf16"),
    ],
)
def test_options_that_do_not_fit_a_model_given_are_refused(tmp_path, is_adapted, options, trainer, word):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))
    if is_adapted:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(OptionError, match=word):
        fit(FineTuner(model, **options), tmp_path, **trainer)


def test_whole_copies_of_modules_are_said_to_stay_in_the_dtype_of_the_base(tmp_path):
    module = tuner("lora_bf16", lora={**LORA, "modules_to_save": ["q_norm"]})
    with pytest.warns(UserWarning, match=r"2 trained tensors .*bfloat16.*q_norm"):
        fit(module, tmp_path)


def test_names_that_data_modules_ask_for_are_there_before_the_model(tmp_path):
    tuner().configure_model()
    word_tokenizer().save_pretrained(tmp_path)
    AutoConfig.for_model(**CONFIG).save_pretrained(tmp_path)
    module = FineTuner(str(tmp_path), init="random")
    assert module.model is None
    assert module.vocab_size == VOCAB_SIZE
    assert module.tokenizer("w5")["input_ids"] == [5]
    assert tuner().tokenizer is None
    assert tuner(tokenizer=str(tmp_path)).tokenizer.eos_token_id == 2


def test_statuses_say_what_the_model_got(tmp_path):
    module = tuner("qlora")
    assert module.statuses() == []
    module.configure_model()
    assert {status.name: status.state for status in module.statuses()} == {
        "NF4 base": "active",
        "LoRA": "active",
        "low-precision adapters": "active",
    }


# Optimisation.


def shares(module, num_steps):
    """Learning rates of a run, as shares of the peak, recorded by the optimizer itself."""
    found = []

    class Record(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            found.append(optimizer.param_groups[0]["lr"] / module.learning_rate)

    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=num_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        strategy="fastft",
        callbacks=[Record()],
        accumulate_grad_batches=2,
    )
    trainer.fit(module, packed_loader(4))
    return found


def test_schedules_rise_and_fall_as_described():
    assert shares(tuner(warmup_steps=2), 6) == pytest.approx([0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447], abs=1e-6)
    assert shares(tuner(warmup_share=0.5, scheduler="linear", min_learning_rate_share=0.2), 4) == pytest.approx(
        [0.5, 1.0, 1.0, 0.6]
    )
    assert shares(tuner(warmup_steps=0, scheduler="constant"), 3) == pytest.approx([1.0, 1.0, 1.0])
    assert shares(tuner(warmup_steps=100), 2) == pytest.approx([0.01, 0.02])


def test_scheduler_of_the_users_own_moves_per_step_or_epoch(tmp_path):
    halve = {"scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}
    assert shares(tuner(**halve), 3) == pytest.approx([1.0, 0.5, 0.25])
    assert shares(tuner(**halve, scheduler_interval="epoch"), 5) == pytest.approx([1.0, 1.0, 0.5, 0.5, 0.25])
    plateau = tuner(scheduler=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0))
    trainer = quiet_trainer(tmp_path, strategy="fastft", max_steps=-1, max_epochs=2)
    trainer.fit(plateau, packed_loader(2), packed_loader(1))
    assert trainer.lr_scheduler_configs[0].monitor == "val_loss"


def test_schedule_without_an_end_is_refused(tmp_path):
    with pytest.raises(OptionError, match="max_steps"):
        fit(tuner(), tmp_path, max_steps=-1, max_epochs=-1)
    trainer = fit(
        tuner(scheduler="constant", warmup_steps=2), tmp_path, max_steps=-1, max_epochs=-1, max_time={"seconds": 0.01}
    )
    assert trainer.optimizers[0].param_groups[0]["lr"] <= 1e-2


def built_optimizer(tmp_path, **options):
    return fit(tuner(**{"learning_rate": None, **options}), tmp_path, max_steps=1).optimizers[0]


@pytest.mark.parametrize("mode", ["full", "lora", "lora_bf16"])
def test_default_optimizer_of_fp32_masters_is_adamw_in_one_pass(tmp_path, mode):
    optimizer = built_optimizer(tmp_path, mode=mode)
    assert type(optimizer) is FusedAdamW
    assert {(group["initial_lr"], group["weight_decay"]) for group in optimizer.param_groups} == {(2e-4, 0.0)}
    # After the run nothing but the state is held.
    assert not optimizer._tables
    assert optimizer._pairs is None


@pytest.mark.parametrize(
    "options", [{"mode": "full", "dtype": "bfloat16"}, {"mode": "lora_bf16", "adapter_dtype": "bfloat16"}]
)
def test_default_optimizer_of_narrow_weights_keeps_their_averages_narrow(tmp_path, options):
    optimizer = built_optimizer(tmp_path, **options)
    assert type(optimizer) is torch.optim.AdamW
    assert all(group["fused"] for group in optimizer.param_groups)
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.bfloat16}


def test_optimizer_of_the_users_own_keeps_its_options_unless_ours_are_given(tmp_path):
    def make(parameters):
        return torch.optim.SGD(parameters, lr=0.3, weight_decay=0.2)

    assert built_optimizer(tmp_path, optimizer=make).param_groups[0]["initial_lr"] == 0.3
    assert built_optimizer(tmp_path, optimizer=make).param_groups[0]["weight_decay"] == 0.2
    group = built_optimizer(tmp_path, optimizer=make, learning_rate=0.1, weight_decay=0.5).param_groups[0]
    assert (group["initial_lr"], group["weight_decay"]) == (0.1, 0.5)


def test_weight_decay_spares_vectors(tmp_path):
    optimizer = built_optimizer(tmp_path, lora=None, weight_decay=0.1)
    for group in optimizer.param_groups:
        assert {parameter.ndim > 1 for parameter in group["params"]} == {group["weight_decay"] == 0.1}
    assert len(optimizer.param_groups) == 2


def test_model_with_nothing_to_train_is_refused(tmp_path):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG)).requires_grad_(False)
    with pytest.raises(OptionError, match="no trainable parameter"):
        fit(FineTuner(model), tmp_path)


# Precision.


def test_precision_is_checked_on_every_run(tmp_path):
    module = tuner("lora_bf16")
    with pytest.raises(OptionError, match="bf16-true"):
        fit(module, tmp_path, precision="bf16-true")
    fit(module, tmp_path)
    with pytest.raises(OptionError, match="bf16-mixed"):
        fit(module, tmp_path, precision="bf16-mixed")
    assert {parameter.dtype for parameter in trainable(module).values()} == {torch.float32}


def test_fp32_is_refused_where_matmuls_are_not_fp32(tmp_path):
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(OptionError, match="'highest'"):
            fit(tuner(), tmp_path)
    finally:
        torch.set_float32_matmul_precision("highest")


# Saving and resuming.


@pytest.mark.parametrize("mode", MODES)
def test_resumed_run_equals_the_uninterrupted_one(tmp_path, mode):
    # One batch again and again: where to go on in the data is the data module's part.
    loader = DataLoader(packed_batches(1) * 3, batch_size=None)

    def run(**options):
        seed_everything(7, verbose=False)
        module = tuner(mode, warmup_steps=2)
        keep = ModelCheckpoint(
            dirpath=tmp_path, filename="{epoch}", save_on_train_epoch_end=True, every_n_epochs=1, save_top_k=-1
        )
        trainer = quiet_trainer(tmp_path, strategy="fastft", max_steps=6, enable_checkpointing=True, callbacks=[keep])
        trainer.fit(module, loader, **options)
        return module, trainer

    whole, _ = run()
    path = tmp_path / "epoch=0.ckpt"
    content = torch.load(path, weights_only=True)
    assert content["global_step"] == 3
    assert set(content["state_dict"]) == (set(trainable(whole)) if mode != "full" else set(whole.state_dict()))
    resumed, trainer = run(ckpt_path=path)
    assert trainer.global_step == 6
    for name, expected in trainable(whole).items():
        assert torch.equal(trainable(resumed)[name], expected), name
        assert not torch.equal(content["state_dict"][name], expected), name


def test_weights_only_checkpoint_holds_adapters_only(tmp_path):
    module = tuner("qlora")
    trainer = fit(module, tmp_path)
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    content = torch.load(tmp_path / "weights.ckpt", weights_only=True)
    assert set(content["state_dict"]) == set(trainable(module))
    assert "optimizer_states" not in content


def test_checkpoint_of_other_adapters_or_another_base_is_refused(tmp_path):
    seed_everything(1, verbose=False)
    fit(tuner(), tmp_path).save_checkpoint(tmp_path / "a.ckpt")

    def resume(module, seed):
        seed_everything(seed, verbose=False)
        quiet_trainer(tmp_path, strategy="fastft").fit(module, packed_loader(3), ckpt_path=tmp_path / "a.ckpt")

    with pytest.raises(ResumeError, match=r"0 missing, 24 \(.*lora_A.*\) left over"):
        resume(tuner(lora={**LORA, "target_modules": ["q_proj"]}), 1)
    with pytest.raises(ResumeError, match=r"seed_everything\(1\)"):
        resume(tuner(), 2)


def test_hyperparameters_are_plain_and_rebuild_the_module(tmp_path):
    seed_everything(3, verbose=False)
    module = FineTuner(
        AutoConfig.for_model(**CONFIG),
        init="random",
        lora=LoraConfig(r=3, target_modules=["q_proj"]),
        dtype="float32",
        warmup_steps=4,
    )
    assert json.loads(json.dumps(dict(module.hparams))) == dict(module.hparams)
    trainer = fit(module, tmp_path)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    seed_everything(3, verbose=False)
    again = FineTuner.load_from_checkpoint(tmp_path / "a.ckpt", map_location="cpu", weights_only=True)
    assert again.hparams == module.hparams
    assert again.lora.r == 3
    assert all(torch.equal(trainable(again)[name], value) for name, value in trainable(module).items())


@pytest.fixture
def bucket():
    """A folder in memory."""
    files = fsspec.filesystem("memory")
    yield "memory://bucket"
    files.rm("/bucket", recursive=True)


def test_module_is_loaded_from_the_url_of_a_checkpoint(tmp_path, bucket):
    url = f"{bucket}/a.ckpt"
    trainer = fit(module := tuner(), tmp_path)
    trainer.save_checkpoint(url)
    again = FineTuner.load_from_checkpoint(url, map_location="cpu", learning_rate=0.5)
    assert again.learning_rate == 0.5
    assert all(torch.equal(trainable(again)[name], value) for name, value in trainable(module).items())
    files = fsspec.filesystem("memory")
    (place,) = [place for place in files.find("/bucket") if place.endswith("checkpoint.ckpt")]
    files.pipe_file(place, files.cat_file(place)[:-1])
    with pytest.raises(DamagedCheckpointError, match=r"a\.ckpt"):
        FineTuner.load_from_checkpoint(url)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_local_checkpoint_is_loaded_from_a_file_and_a_folder_is_refused(tmp_path, scheme):
    module = tuner()
    fit(module, tmp_path).save_checkpoint(tmp_path / "a.ckpt")
    again = FineTuner.load_from_checkpoint(f"{scheme}{tmp_path}/a.ckpt")
    assert all(torch.equal(trainable(again)[name], value) for name, value in trainable(module).items())
    with pytest.raises(OptionError, match="fastft_fsdp"):
        FineTuner.load_from_checkpoint(f"{scheme}{tmp_path}")


def test_saved_adapters_load_in_stock_peft_with_equal_logits(tmp_path):
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))
    base.save_pretrained(tmp_path / "base")
    module = FineTuner(
        str(tmp_path / "base"), tokenizer=word_tokenizer(), lora=LORA, dtype="float32", learning_rate=1e-2
    )
    fit(module, tmp_path)
    module.save_pretrained(tmp_path / "adapters")
    stock = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapters")
    ids = torch.randint(3, VOCAB_SIZE, (2, 9))
    logits = module.model.eval()(ids).logits
    assert torch.equal(stock.eval()(ids).logits, logits)
    assert not torch.allclose(base.eval()(ids).logits, logits, atol=1e-3)
    assert AutoTokenizer.from_pretrained(tmp_path / "adapters").eos_token_id == 2
    assert stock.peft_config["default"].base_model_name_or_path == str(tmp_path / "base")


def test_saved_model_loads_in_stock_transformers(tmp_path):
    module = tuner("full")
    with pytest.raises(OptionError, match="no model yet"):
        module.save_pretrained(tmp_path)
    fit(module, tmp_path)
    module.save_pretrained(tmp_path / "model")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = torch.randint(3, VOCAB_SIZE, (2, 9))
    assert torch.equal(stock.eval()(ids).logits, module.model.eval()(ids).logits)
    assert stock.config._attn_implementation == "sdpa"


# Generation.


def test_generation_of_a_batch_equals_one_by_one_and_restores_the_mode(tmp_path):
    module = tuner("lora", tokenizer=word_tokenizer())
    fit(module, tmp_path, max_steps=12)
    module.model.base_model.model.model.layers[0].eval()
    modes = [part.training for part in module.modules()]
    prompts = ["w5", "w7 w8 w9 w10 w11", "w20 w21"]
    together = module.generate(prompts, max_new_tokens=5, do_sample=False)
    assert together == [module.generate([prompt], max_new_tokens=5, do_sample=False)[0] for prompt in prompts]
    assert len(set(together)) > 1
    assert [part.training for part in module.modules()] == modes
    ids = torch.tensor([[7, 8, 9, 10, 11]])
    written = module.model.eval().generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, pad_token_id=0
    )
    assert together[1] == word_tokenizer().decode(written[0, 5:], skip_special_tokens=True)


def test_generation_takes_conversations_and_refuses_what_it_cannot_do():
    module = tuner("full", tokenizer=word_tokenizer(template=True))
    with pytest.raises(OptionError, match="not built"):
        module.generate(["w5"])
    module.configure_model()
    chat = module.generate([[{"role": "user", "content": "w5 w6"}]], max_new_tokens=4, do_sample=False)
    assert chat == module.generate(["w5 w6 w9"], max_new_tokens=4, do_sample=False)
    with pytest.raises(OptionError, match="a list"):
        module.generate("w5")
    other = tuner("full")
    other.configure_model()
    with pytest.raises(OptionError, match="tokenizer"):
        other.generate(["w5"])
    with pytest.raises(OptionError, match="Prompt 1 has no token"):
        module.generate(["w5", ""])
    assert module.generate([]) == []


def test_generation_works_while_packed_training_is_installed(tmp_path):
    answers = []

    class Ask(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            answers.append(pl_module.generate(["w5 w6", "w7"], max_new_tokens=3, do_sample=False))

    module = tuner("lora", tokenizer=word_tokenizer())
    fit(module, tmp_path, callbacks=[Ask()])
    assert len(answers) == 3
    assert answers[-1] == module.generate(["w5 w6", "w7"], max_new_tokens=3, do_sample=False)


# Options.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "nf4", "lora": None}, "give lora"),
        ({"quantization": "int8"}, "nf4"),
        ({"dtype": "fp8"}, "bfloat16"),
        ({"adapter_dtype": "float16"}, "float32"),
        ({"scheduler": "cosin"}, "cosine"),
        ({"warmup_share": 1.5}, "warmup_share"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"weight_decay": float("nan")}, "weight_decay"),
        ({"scheduler_interval": "batch"}, "epoch"),
        ({"lora": {"rank": 3}}, "rank"),
        ({"init": "zeros"}, "random"),
        ({"master_dtype": "float32"}, "adapter_dtype"),
        ({"model": 3}, "got int"),
        ({"optimizer": "adam"}, "optimizer"),
        ({"revision": ""}, "revision"),
    ],
)
def test_impossible_options_are_refused_by_name(options, message):
    with pytest.raises(OptionError, match=message):
        FineTuner(**{"model": CONFIG, "init": "random", "lora": LORA, **options})


def test_command_line_reads_every_option_from_plain_values():
    from lightning.pytorch.cli import LightningCLI

    model = {
        "class_path": "lightning_fastft.training.fine_tuner.FineTuner",
        "init_args": {
            "model": CONFIG, "init": "random", "lora": {"r": 4}, "learning_rate": 1e-3, "scheduler": "linear",
            "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"momentum": 0.9}},
        },
    }  # fmt: skip
    cli = LightningCLI(
        pl.LightningModule,
        subclass_mode_model=True,
        auto_configure_optimizers=False,
        run=False,
        save_config_callback=None,
        args={"model": model},
    )
    assert cli.model.lora.r == 4
    assert cli.model.scheduler == "linear"
    assert cli.model.vocab_size == VOCAB_SIZE
    cli.model.configure_model()
    optimizer = cli.model.optimizer_factory([torch.nn.Parameter(torch.ones(1))])
    assert (type(optimizer).__name__, optimizer.param_groups[0]["momentum"]) == ("SGD", 0.9)


def test_batch_of_one_document_needs_no_packed_attention(tmp_path):
    documents = packed_batches(1)[0]
    start, end = documents.context.start_host_S1[:2].tolist()
    from lightning_fastft.packing.collate import Document

    ids = documents["input_ids"][0, start:end].numpy()
    trainer = quiet_trainer(tmp_path, max_steps=1)
    trainer.fit(tuner(), DataLoader([collate([Document(ids, ids.copy())])], batch_size=None))
    assert trainer.global_step == 1


@pytest.mark.parametrize("pad_to_max", [False, True])
def test_log_probabilities_of_documents_are_predicted_as_of_each_alone(pad_to_max, tmp_path):
    generator = torch.Generator().manual_seed(3)
    rows = []
    for length in (7, 3, 12, 5, 2, 9, 4):
        ids = torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
        # Prompts of some length, and one row without a trained token behind the first.
        rows.append({"input_ids": ids, "labels": [-100] * (length // 2) + ids[length // 2 :]})
    module = tuner(learning_rate=None, lora={**LORA, "init_lora_weights": False})
    data = PackedDataModule(
        None, predict_paths=rows, max_tokens=16, pad_to_max=pad_to_max, num_workers=0, cache_dir=None, num_proc=1,
        show_progress=False,
    )  # fmt: skip
    numbers = []

    class Numbers(Callback):
        def on_predict_batch_end(self, trainer, module, outputs, batch, *args):
            numbers.extend(batch.numbers)

    found = quiet_trainer(tmp_path, strategy="fastft", callbacks=[Numbers()]).predict(module, datamodule=data)
    assert len(found) > 1
    assert sorted(numbers) == list(range(7))
    for number, value in zip(numbers, torch.cat(found)):
        ids, labels = (torch.tensor(rows[number][name])[None] for name in ("input_ids", "labels"))
        with torch.no_grad():
            log_prob = module.model(input_ids=ids).logits[:, :-1].log_softmax(-1)
        chosen = labels[0, 1:] != -100
        truth = log_prob[0, chosen].gather(1, ids[0, 1:][chosen][:, None]).sum()
        torch.testing.assert_close(value, truth, atol=1e-5, rtol=1e-5)


def test_a_pack_of_padding_has_no_document_to_predict(tmp_path):
    module, empty = tuner(), collate([], pad_to=8)
    (found,) = quiet_trainer(tmp_path, strategy="fastft").predict(module, DataLoader([empty], batch_size=None))
    assert found.shape == (0,)
