"""CausalLMModule, through FineTuner: building, precision, saving, resuming, and what stock PEFT and transformers read."""

import copy
import json
from unittest import mock

import fsspec
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lightning_fastft.checkpoint.folders import save_folder
from lightning_fastft.core.errors import (
    DamagedCheckpointError,
    OptionError,
    ResumeError,
    SwapError,
)
from lightning_fastft.strategies.registry import register_strategies
from lightning_fastft.training.fine_tuner import FineTuner
from tests.support.fine_tuners import CONFIG, LORA, MODES, fit, trainable, tuner, word_tokenizer
from tests.support.training_parts import VOCAB_SIZE, SaveAtStep, packed_batches, packed_loader, quiet_trainer

register_strategies()


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


@pytest.mark.parametrize(
    ("mode", "callback"),
    [
        # It would average no weight, and end with those of the last step.
        ("full", StochasticWeightAveraging(swa_lrs=1e-2)),
        # They would round the frozen base.
        ("lora_bf16", EMAWeightAveraging()),
        ("qlora", WeightAveraging()),
    ],
)
def test_averages_of_other_tensors_are_refused(mode, callback, tmp_path):
    with pytest.raises(OptionError, match=type(callback).__name__):
        fit(tuner(mode), tmp_path, callbacks=[callback], max_epochs=1)


class Freezing(BaseFinetuning):
    """Freezes the first layer by name, which finds nothing in a module without a model."""

    def freeze_before_training(self, pl_module):
        self.freeze([layer for name, layer in pl_module.named_modules() if name.endswith("layers.0")])

    def finetune_function(self, pl_module, epoch, optimizer):
        pass


@pytest.mark.parametrize(
    "callback",
    [ModelPruning("l1_unstructured", amount=0.5), BackboneFinetuning(), Freezing()],
    ids=lambda callback: type(callback).__name__,
)
@pytest.mark.parametrize("mode", ["full", "lora"])
def test_callbacks_that_need_the_model_before_it_is_built_are_refused(mode, callback, tmp_path):
    with pytest.raises(OptionError, match=type(callback).__name__):
        fit(tuner(mode), tmp_path, callbacks=[callback], max_epochs=1)


def test_layers_of_a_built_model_can_be_frozen_by_a_callback(tmp_path):
    module = FineTuner(AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG)), learning_rate=1e-2)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    fit(module, tmp_path, callbacks=[Freezing()], max_epochs=1)
    moved = {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}
    assert any("layers.1." in name for name in moved)
    assert not any("layers.0." in name for name in moved)


class WithBackbone(FineTuner):
    """Names its layers for BackboneFinetuning."""

    @property
    def backbone(self):
        return self.model.model.layers


def test_backbone_finetuning_needs_an_attribute_backbone(tmp_path):
    def built(tuner_class):
        return tuner_class(AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG)), learning_rate=1e-2)

    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=9)
    with pytest.raises(OptionError, match=r"attribute backbone.*pl_module\.model"):
        fit(built(FineTuner), tmp_path, callbacks=[callback], max_epochs=1)
    with pytest.raises(OptionError, match="before the model is built"):
        fit(WithBackbone(CONFIG, init="random"), tmp_path, callbacks=[callback], max_epochs=1)
    module = built(WithBackbone)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    fit(module, tmp_path, callbacks=[callback], max_epochs=1)
    moved = {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}
    assert moved
    assert not any("layers." in name for name in moved)


def test_averages_in_bf16_are_refused(tmp_path):
    # Most of their steps are too small for its digits.
    with pytest.raises(OptionError, match=r"EMAWeightAveraging.*bfloat16"):
        fit(tuner("full", dtype="bfloat16"), tmp_path, callbacks=[EMAWeightAveraging()])


def test_averages_leave_what_is_not_trained_as_it_is(tmp_path):
    # 0.9 x + 0.1 x is not x, in a third of all numbers.
    callback, module, untrained = EMAWeightAveraging(decay=0.9), tuner("lora"), tuner("lora")
    seed_everything(3, verbose=False)
    fit(module, tmp_path, callbacks=[callback])
    seed_everything(3, verbose=False)
    untrained.configure_model()
    before, after = ({**dict(each.named_parameters()), **dict(each.named_buffers())} for each in (untrained, module))
    assert any("inv_freq" in name for name in after)
    for name, value in before.items():
        assert torch.equal(value, after[name]) is not value.requires_grad, name


def test_averaged_adapters_resume(tmp_path):
    # A plain loader begins anew, so all batches are equal.
    path, loader = tmp_path / "a.ckpt", DataLoader(packed_batches(1) * 3, batch_size=None)

    def run(**options):
        # Averages are of adapters that were drawn before.
        seed_everything(3, verbose=False)
        module = tuner("lora")
        callbacks = [EMAWeightAveraging(decay=0.5), SaveAtStep(2, path)]
        quiet_trainer(tmp_path, strategy="fastft", callbacks=callbacks).fit(module, loader, **options)
        return trainable(module)

    whole = run()
    for name, value in run(ckpt_path=path).items():
        torch.testing.assert_close(value, whole[name], rtol=0, atol=0, msg=name)


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


def test_module_is_loaded_from_a_folder_of_shards(tmp_path):
    module = tuner()
    fit(module, tmp_path).save_checkpoint(tmp_path / "a.ckpt")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    save_folder(torch.load(tmp_path / "a.ckpt"), tmp_path / "shards.ckpt")
    dist.destroy_process_group()
    again = FineTuner.load_from_checkpoint(tmp_path / "shards.ckpt")
    assert all(torch.equal(trainable(again)[name], value) for name, value in trainable(module).items())


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
