"""FineTuner: full, LoRA and QLoRA runs train, evaluate, resume, save and generate; what cannot be served as asked
is refused by name.
"""

import itertools
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader

from lightning_fastft.callbacks.packed_training import PackedTraining
from lightning_fastft.core.errors import (
    ContextError,
    DataError,
    OptionError,
)
from lightning_fastft.packing.collate import collate
from lightning_fastft.strategies.registry import register_strategies
from lightning_fastft.training.fine_tuner import FineTuner
from tests.support.fine_tuners import CONFIG, LORA, MODES, fit, trainable, tuner
from tests.support.host_waits import HostWaits
from tests.support.tiny_models import build_tiny
from tests.support.training_parts import VOCAB_SIZE, packed_batches, packed_loader, quiet_data, quiet_trainer

register_strategies()


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


def test_batches_can_be_read_after_the_run_and_a_restored_model_refuses_them(tmp_path):
    module, data = tuner(), quiet_data([{"input_ids": [3, 4, 5, 6]}, {"input_ids": [7, 8, 9]}], val_share=0.0)
    quiet_trainer(tmp_path, strategy="fastft", max_steps=1).fit(module, data)
    data.setup("fit")
    (batch,) = itertools.islice(data.train_dataloader(), 1)
    assert sorted(batch.context.lengths) == [3, 4]
    with pytest.raises(ContextError, match="without packed attention"):
        module.model(**batch)


def test_auxiliary_loss_of_routers_counts_no_padding(tmp_path):
    """The pad tail changes neither the step nor what is logged."""

    def step(**padding):
        model = build_tiny("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.5)
        module = FineTuner(model, dtype="float32", optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))
        trainer = quiet_trainer(tmp_path, strategy="fastft", max_steps=1)
        trainer.fit(module, packed_loader(1, **padding))
        return dict(module.model.named_parameters()), trainer.callback_metrics["train_loss"]

    (expected, expected_loss), (found, loss) = step(), step(pad_to=96)
    assert loss == pytest.approx(float(expected_loss), rel=1e-5)
    for name, parameter in expected.items():
        torch.testing.assert_close(found[name], parameter, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("lora", [None, {"r": 4, "target_modules": ["lm_head"]}])
def test_train_loss_has_the_auxiliary_loss_once(lora, tmp_path):
    """A large window scales the cross-entropy, not the auxiliary loss; also where the head is not lazy."""

    def logged(**options):
        model = build_tiny("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.5)
        trainer = quiet_trainer(tmp_path, strategy="fastft", max_steps=1)
        trainer.fit(FineTuner(model, dtype="float32", lora=lora), packed_loader(1, **options))
        return float(trainer.callback_metrics["train_loss"])

    assert logged(num_items=1000.0) == pytest.approx(logged(), rel=1e-5)


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


@pytest.mark.parametrize("hooks", [("start", "end"), ("epoch_start", "epoch_end"), ("epoch_start", "end")])
def test_copies_follow_weights_that_are_swapped_for_a_validation(tmp_path, hooks):
    """Callbacks that evaluate an average write through .data, which no version counter shows."""
    counts = {"validation": 0, "training": 0}

    class Swap(Callback):
        def swap(self, trainer, pl_module):
            for name, parameter in trainable(pl_module).items():
                if "lora_B" in name:
                    parameter.data.neg_()

        def check(self, pl_module, *, when):
            for module in pl_module.model.modules():
                if (low_copy := vars(module).get("fastft_copy")) is not None:
                    counts[when] += 1
                    assert torch.equal(low_copy.tensor, module.weight.to(torch.bfloat16)), when

        def on_validation_batch_start(self, trainer, pl_module, *args):
            self.check(pl_module, when="validation")

        def on_train_batch_start(self, trainer, pl_module, *args):
            self.check(pl_module, when="training")

    for hook in hooks:
        setattr(Swap, f"on_validation_{hook}", Swap.swap)
    trainer = quiet_trainer(
        tmp_path, strategy="fastft", callbacks=[Swap()], val_check_interval=1, num_sanity_val_steps=0
    )
    trainer.fit(tuner("lora_bf16"), packed_loader(3), packed_loader(1))
    assert counts == {"validation": 3 * 2 * 7 * 2, "training": 2 * 2 * 7 * 2}


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
    unlabelled = DataLoader([{"input_ids": ids[0]}], batch_size=None)
    with pytest.raises(DataError, match="labels"):
        quiet_trainer(tmp_path).fit(tuner(), unlabelled)
    with pytest.raises(DataError, match="labels"):
        quiet_trainer(tmp_path).validate(tuner(), unlabelled, verbose=False)


@pytest.mark.parametrize(
    ("batch", "told"), [({"prompt": "a", "completion": "b"}, "prompt, completion"), ([torch.zeros(1, 9)], "list")]
)
def test_rows_that_no_datamodule_has_tokenised_are_refused_with_the_way_out(tmp_path, batch, told):
    rows = DataLoader([batch], batch_size=None)
    with pytest.raises(DataError, match=f"{told}.*datamodule=PackedDataModule"):
        quiet_trainer(tmp_path).fit(tuner(), rows)
    with pytest.raises(DataError, match="datamodule=PackedDataModule"):
        quiet_trainer(tmp_path).validate(tuner(), rows, verbose=False)


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


# Options.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "nf4", "lora": None}, "give lora"),
        ({"lora": {"rank": 3}}, "rank"),
        ({"master_dtype": "float32"}, "adapter_dtype"),
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
    data = quiet_data(None, predict_paths=rows, max_tokens=16, pad_to_max=pad_to_max)
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
