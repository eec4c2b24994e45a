"""Tuners through Trainer.fit: small tasks that each method learns, their data, resumed runs, and what a step waits for."""

import math
import random
import re
import warnings
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_fastft.callbacks.finite_guard import FiniteGuard
from lightning_fastft.callbacks.gradient_health import GradientHealth
from lightning_fastft.callbacks.watchdog import Watchdog
from lightning_fastft.core.async_reader import AsyncScalarReader
from lightning_fastft.core.errors import DataError, NotTrainingError, ResumeError
from lightning_fastft.monitor.run_report import RunReport
from lightning_fastft.monitor.token_throughput import TokenThroughput
from lightning_fastft.packing.collate import collate
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.data.rollouts import make_rollout
from lightning_fastft.training.datamodule import PackedDataModule
from lightning_fastft.training.distillation import DistillationTuner
from lightning_fastft.training.fine_tuner import FineTuner
from lightning_fastft.training.policy import PolicyTuner
from lightning_fastft.training.preference import PreferenceTuner
from lightning_fastft.training.reward import RewardTuner
from lightning_fastft.training.samplers import Sampled
from tests.support.host_waits import CountSteps
from tests.support.tiny_models import build_tiny
from tests.support.training_parts import SaveAtStep, quiet_trainer
from tests.training.test_rollouts import CONFIG, character_tokenizer

EVEN, ODD = "02468", "13579"


def digit_rows(num_rows, *, kind="preference", follows_prompt=False, seed=0):
    """Right completions are of even digits, or where they follow the prompt of the parity of its last digit."""
    draws = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        prompt = "".join(draws.choices(EVEN + ODD, k=draws.randint(1, 4)))
        right, wrong = (ODD, EVEN) if follows_prompt and prompt[-1] in ODD else (EVEN, ODD)
        chosen, rejected = ("".join(draws.choices(digits, k=draws.randint(1, 3))) for digits in (right, wrong))
        if kind == "preference":
            rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
        else:
            is_right = draws.random() < 0.5
            value = is_right if kind == "label" else float(is_right)
            rows.append({"prompt": prompt, "completion": chosen if is_right else rejected, kind: value})
    return rows


def make(tuner_class, **options):
    values = {"learning_rate": 1e-2, "scheduler": "constant", "warmup_steps": 0, "tokenizer": character_tokenizer()}
    return tuner_class(CONFIG, init="random", dtype="float32", **{**values, **options})


def make_data(rows, **options):
    values = {
        "max_tokens": 256, "num_workers": 0, "cache_dir": None, "num_proc": 1, "show_progress": False,
    }  # fmt: skip
    return PackedDataModule(rows, **{**values, **options})


def fit(tmp_path, tuner, data, *, ckpt_path=None, **options):
    trainer = quiet_trainer(tmp_path, **{"strategy": FastFTStrategy(), **options})
    trainer.fit(tuner, data, ckpt_path=ckpt_path)
    return trainer


LORA = {"r": 8, "target_modules": "all-linear"}
METHODS = {
    "dpo": {"reference": "stored", "beta": 0.3, "learning_rate": 5e-3},
    "ipo": {"loss": "ipo", "reference": "stored"},
    "orpo": {"loss": "orpo", "beta": 1.0},
    "simpo": {"loss": "simpo", "beta": 2.0},
    "cpo": {"loss": "cpo"},
    "kto": {"loss": "kto", "reference": "stored", "beta": 0.5},
}
IN_EVERY_RUN = ("dpo", "orpo", "kto")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "is_packed"),
    [
        *((method, True) for method in IN_EVERY_RUN),
        *(pytest.param(method, True, marks=pytest.mark.fault) for method in METHODS if method not in IN_EVERY_RUN),
        *(pytest.param(method, False, marks=pytest.mark.fault) for method in ("dpo", "orpo")),
    ],
)
def test_held_out_completions_are_told_apart(tmp_path, method, is_packed):
    tuner = make(PreferenceTuner, **METHODS[method])
    rows = digit_rows(320, kind="label" if tuner.loss == "kto" else "preference", follows_prompt=True)
    # Some twelve examples in each step either way.
    data = make_data(rows, val_share=0.25, max_tokens=160 if is_packed else 13)
    # Without packs a step has fewer pairs.
    epochs, accumulate = (5, 1) if is_packed else (6, 12)
    trainer = fit(tmp_path, tuner, data, max_epochs=epochs, max_steps=-1, accumulate_grad_batches=accumulate)
    per_pack = len(data.subset("train")) / len(data.packs("train"))
    assert per_pack > 8 if is_packed else per_pack < 1.5
    assert float(trainer.callback_metrics["val_reward_accuracy"]) > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("tuner_class", [pytest.param(PreferenceTuner, marks=pytest.mark.fault), RewardTuner])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "adapters"])
def test_held_out_pairs_of_a_simple_rule_are_told_apart(tmp_path, tuner_class, lora):
    options = {"reference": "stored"} if tuner_class is PreferenceTuner and lora is None else {}
    tuner = make(tuner_class, lora=lora, **options)
    trainer = fit(tmp_path, tuner, make_data(digit_rows(320), val_share=0.25), max_epochs=4, max_steps=-1)
    name = "val_reward_accuracy" if tuner_class is PreferenceTuner else "val_accuracy"
    assert float(trainer.callback_metrics[name]) > 0.95


@pytest.mark.slow
def test_a_reward_model_meets_held_out_scores(tmp_path):
    tuner = make(RewardTuner, loss="scalar", read="mean")
    data = make_data(digit_rows(320, kind="score"), val_share=0.25)
    trainer = fit(tmp_path, tuner, data, max_epochs=5, max_steps=-1)
    # Scores are 0 and 1: a constant leaves 0.25.
    assert float(trainer.callback_metrics["val_loss"]) < 0.05


# What a step waits for, and callbacks beside a tuner.


def make_kind(kind, folder):
    """A tuner with its data, each with what it reads in a step: a reference, stored values, a teacher, rewards."""
    rows, text = digit_rows(60), [{"text": row["prompt"] + row["chosen"]} for row in digit_rows(60)]
    makers = {
        "dpo, adapters": lambda: (make(PreferenceTuner, lora=LORA), rows),
        "dpo, stored": lambda: (make(PreferenceTuner, reference="stored"), rows),
        "dpo, second model": lambda: (make(PreferenceTuner, reference=make_teacher()), rows),
        "orpo": lambda: (make(PreferenceTuner, loss="orpo"), rows),
        "kto": lambda: (make(PreferenceTuner, loss="kto", lora=LORA), digit_rows(60, kind="label")),
        "reward": lambda: (make(RewardTuner), rows),
        "reward, mean of scores": lambda: (make(RewardTuner, lora=LORA, loss="scalar", read="mean"), scored),
        "reward, steps": lambda: (
            make(RewardTuner, lora=LORA, loss="stepwise"),
            [{"prompt": "1", "completions": ["2", "34"], "labels": [True, 0.25]}] * 60,
        ),
        "policy": lambda: (make(PolicyTuner), rollouts),
        "policy, sequences": lambda: (make(PolicyTuner, lora=LORA, kl_weight=0.1, ratio="sequence"), rollouts),
        "distillation": lambda: (make(DistillationTuner, teacher=make_teacher(), sft_weight=0.5), text),
        "distillation, stored": lambda: (
            make(DistillationTuner, teacher=make_teacher(), store=str(folder / "store"), top_k=4),
            text,
        ),
        "distillation, hidden states": lambda: (
            make(DistillationTuner, teacher=make_teacher(), store=str(folder / "store"), top_k=None, kind="jsd"),
            text,
        ),
    }
    scored = digit_rows(60, kind="score")
    rollouts = [
        {"prompt_ids": [3, 4], "completion_ids": [[5], [6, 7]], "rewards": [1.0, 0.0], "log_probs": [[-1], [-2, -1]]}
    ] * 60
    tuner, data = makers[kind]()
    return tuner, make_data(data, max_tokens=128, val_share=0.1)


KINDS = (
    "dpo, adapters", "dpo, stored", "dpo, second model", "orpo", "kto", "reward", "reward, mean of scores",
    "reward, steps", "policy",
    "policy, sequences", "distillation", "distillation, stored",
    "distillation, hidden states",
)  # fmt: skip


def make_teacher():
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_waits_for_nothing(tmp_path, kind):
    tuner, data = make_kind(kind, tmp_path)
    # The plain twin of FusedAdamW, for a CPU, reads counts; its kernel is judged on a GPU.
    tuner.optimizer_factory = lambda groups: torch.optim.AdamW(groups, fused=True)
    counter = CountSteps()
    with mock.patch.object(AsyncScalarReader, "poll", return_value=[]):
        fit(tmp_path, tuner, data, callbacks=[GradientHealth(), FiniteGuard(), counter], max_steps=3)
    assert len(counter.waits) == 3
    for waits in counter.waits:
        assert waits.total == 0, waits.origin


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_callbacks_serve_a_tuner(tmp_path, kind):
    tuner, data = make_kind(kind, tmp_path)
    health, guard, throughput = GradientHealth(num_steps=3), FiniteGuard(), TokenThroughput(log_every_n_steps=1)
    # A profile is of kernels, whatever the tuner.
    report = RunReport(tmp_path / "run.html", profile_step=2 if kind == KINDS[0] else None)
    fit(tmp_path, tuner, data, callbacks=[health, guard, throughput, report, Watchdog()], max_steps=4)
    assert "moved" in health.status().reason
    assert "0 of 4 steps skipped" in guard.status().reason
    assert throughput.latest
    assert (tmp_path / "run.json").is_file()


def rollout_loader(*rewards):
    """One rollout with these rewards in each step."""
    groups = [[Sampled([5]), Sampled([6, 7])]] * len(rewards)
    documents = [make_rollout([3, 4], group, pair) for group, pair in zip(groups, rewards)]
    return DataLoader([collate([document], num_items=2) for document in documents], batch_size=None)


def test_groups_of_equal_rewards_are_no_sign_of_a_broken_run(tmp_path):
    health = GradientHealth(num_steps=3)
    loader = rollout_loader(*[(1.0, 1.0)] * 4, *[(1.0, 0.0)] * 3)
    with pytest.warns(UserWarning, match="unequal rewards"):
        fit(tmp_path, make(PolicyTuner), loader, callbacks=[health], max_steps=7)
    assert "moved" in health.status().reason


def test_a_run_without_any_unequal_rewards_is_a_broken_one(tmp_path):
    with pytest.warns(UserWarning, match="unequal rewards"), pytest.raises(NotTrainingError, match="unequal rewards"):
        fit(
            tmp_path, make(PolicyTuner), rollout_loader(*[(1.0, 1.0)] * 6), callbacks=[GradientHealth(num_steps=3)],
            max_steps=6,
        )  # fmt: skip


# Data and resumed runs.


RESUMED = {
    "adapters off": {"lora": LORA},
    "adapters, stored": {"lora": LORA, "reference": "stored"},
    "full, stored": {"reference": "stored"},
    "full, kto": {"reference": "stored", "loss": "kto"},
}


@pytest.mark.parametrize("kind", RESUMED)
def test_a_run_goes_on_bit_for_bit_inside_an_epoch(tmp_path, kind):
    rows = digit_rows(60, kind="label" if RESUMED[kind].get("loss") == "kto" else "preference")

    def run(*, callbacks=(), ckpt_path=None, seed=0):
        torch.manual_seed(seed)
        tuner = make(PreferenceTuner, **RESUMED[kind])
        data = make_data(rows, max_tokens=64, val_share=0.2)
        fit(tmp_path, tuner, data, max_steps=6, callbacks=list(callbacks), ckpt_path=ckpt_path)
        return tuner

    whole = run(callbacks=[SaveAtStep(3, tmp_path / "three.ckpt")])
    resumed = run(ckpt_path=str(tmp_path / "three.ckpt"))
    for (name, one), (_, other) in zip(whole.named_parameters(), resumed.named_parameters()):
        assert torch.equal(one, other), name


def test_a_new_run_compares_with_the_model_that_it_begins_with(tmp_path):
    """A second Trainer begins a run; the same one goes on with the run of before."""
    data, tuner, found = make_data(digit_rows(20)), make(PreferenceTuner, reference="stored"), []
    own_step = tuner.training_step

    def step(batch, batch_idx):
        loss = own_step(batch, batch_idx)
        found.append(float(loss.detach()))
        return loss

    tuner.training_step = step
    trainer = fit(tmp_path, tuner, data, max_steps=3)
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(tuner, data)
    fit(tmp_path, tuner, data, max_steps=1)
    assert found[0] == pytest.approx(math.log(2), abs=1e-6)
    assert found[3] < found[0] - 1e-3
    assert found[6] == pytest.approx(math.log(2), abs=1e-6)


def test_other_data_than_that_of_the_stored_reference_is_refused(tmp_path):
    options = {"max_tokens": 64, "val_paths": digit_rows(20, seed=1)}
    length = {"max_epochs": 1, "max_steps": -1}
    first = make(PreferenceTuner, reference="stored")
    saving = SaveAtStep(2, tmp_path / "two.ckpt")
    fit(tmp_path, first, make_data(digit_rows(40), **options), callbacks=[saving], **length)
    length["ckpt_path"] = str(tmp_path / "two.ckpt")
    again = make(PreferenceTuner, reference="stored")
    with pytest.raises(ResumeError, match="data was"):
        fit(tmp_path, again, make_data(digit_rows(40, seed=2), **options), **length)
    # The plan knows the training data; other validation data meets no stored values.
    options["val_paths"] = digit_rows(20, seed=3)
    again = make(PreferenceTuner, reference="stored")
    with pytest.raises(ResumeError, match="val data"):
        fit(tmp_path, again, make_data(digit_rows(40), **options), **length)


@pytest.mark.parametrize(
    ("make_tuner", "rows", "message"),
    [
        (lambda: make(FineTuner), digit_rows(8), "PreferenceTuner"),
        (lambda: make(FineTuner), digit_rows(8, kind="label"), "PreferenceTuner"),
        (lambda: make(FineTuner), digit_rows(8, kind="score"), "RewardTuner"),
        (lambda: make(PreferenceTuner, lora=LORA), [{"text": "123"}] * 8, "preference"),
        (lambda: make(PreferenceTuner, lora=LORA), digit_rows(8, kind="label"), "preference.* chosen, .*loss='kto'"),
        (lambda: make(PreferenceTuner, lora=LORA, loss="kto"), digit_rows(8), "labelled.* label, or .*loss='sigmoid'"),
        (lambda: make(RewardTuner), digit_rows(8, kind="score"), "preference"),
        (lambda: make(PolicyTuner), digit_rows(8), "rollouts"),
    ],
)
def test_rows_of_another_kind_are_refused(tmp_path, make_tuner, rows, message):
    with pytest.raises(DataError, match=message):
        fit(tmp_path, make_tuner(), make_data(rows), max_steps=1)


def test_tests_on_pairs_name_the_command_that_compares_them(tmp_path):
    trainer = quiet_trainer(tmp_path, strategy=FastFTStrategy())
    with pytest.raises(DataError, match="by fastft validate"):
        trainer.test(make(FineTuner), make_data(None, test_paths=digit_rows(8)))


LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 32,
    }
}  # fmt: skip


@pytest.mark.parametrize(("family", "reason"), [("qwen3_next", "recurrent mixers"), ("longrope", "longrope")])
def test_prompts_are_repeated_where_they_cannot_be_shared(tmp_path, caplog, family, reason):
    is_hybrid = family == "qwen3_next"
    model = build_tiny("qwen3_next") if is_hybrid else {**CONFIG, "model_type": "phi3", "pad_token_id": 0, **LONGROPE}
    options = {"lora": LORA} if is_hybrid else {"lora": LORA, "init": "random"}
    tuner = PreferenceTuner(model, dtype="float32", tokenizer=character_tokenizer(), **options)
    data = make_data(digit_rows(12), max_tokens=64)
    seen = []
    tuner.on_train_batch_start = lambda batch, batch_idx: seen.append(batch.context)
    with caplog.at_level("INFO"):
        fit(tmp_path, tuner, data, max_steps=1)
    assert not seen[0].has_prefixes
    assert seen[0].completions.num_examples > 1
    assert any("repeated" in line and reason in line for line in caplog.messages)


@pytest.mark.parametrize("pad_to_max", [True, False])
def test_padding_changes_no_loss(tmp_path, pad_to_max):
    torch.manual_seed(0)
    tuner = make(PreferenceTuner, lora=LORA, learning_rate=0.0)
    data = make_data(digit_rows(24), max_tokens=80, pad_to_max=pad_to_max, val_share=0.3)
    losses = []
    own_step = tuner.training_step

    def step(batch, batch_idx):
        assert not pad_to_max or batch["input_ids"].shape[1] == 80
        losses.append((batch.numbers, own_step(batch, batch_idx)))
        return losses[-1][1]

    tuner.training_step = step
    trainer = fit(tmp_path, tuner, data, max_epochs=1, max_steps=-1)
    assert float(trainer.callback_metrics["val_loss"]) == pytest.approx(0.6931, abs=1e-3)
    # Adapters start at nothing: every pair has a loss of log 2, and one window is one pack.
    assert all(float(loss.detach()) == pytest.approx(0.6931, abs=1e-3) for _, loss in losses)


def test_held_out_examples_read_their_own_stored_reference(tmp_path):
    torch.manual_seed(0)
    tuner = make(PreferenceTuner, reference="stored", learning_rate=0.0)
    data = make_data(digit_rows(40), max_tokens=64, val_share=0.4)
    trainer = fit(tmp_path, tuner, data, max_epochs=1, max_steps=-1)
    # An untrained model is its own reference in each example: any exchanged value gives another loss.
    assert float(trainer.callback_metrics["val_loss"]) == pytest.approx(math.log(2), abs=1e-6)
    assert float(trainer.callback_metrics["train_loss"]) == pytest.approx(math.log(2), abs=1e-6)


def test_a_model_is_compared_with_itself_before_its_run_begins(tmp_path):
    tuner = make(PreferenceTuner, reference="stored")
    data = make_data(digit_rows(20), val_paths=digit_rows(8, seed=1), test_paths=digit_rows(8, seed=2))
    trainer = quiet_trainer(tmp_path, strategy=FastFTStrategy(), max_steps=3)
    for run, split in ((trainer.validate, "val"), (trainer.test, "test")):
        (found,) = run(tuner, data, verbose=False)
        assert found[f"{split}_loss"] == pytest.approx(math.log(2), abs=1e-6)
    trainer.fit(tuner, data)
    (after,) = trainer.validate(tuner, data, verbose=False)
    assert after["val_loss"] != pytest.approx(math.log(2), abs=1e-4)
    with pytest.raises(ResumeError, match=r"test data.*val_paths"):
        trainer.test(tuner, data, verbose=False)
    # A continued run does not take the trained model for the reference of data that it meets now.
    trainer.fit_loop.epoch_loop.max_steps = 4
    with pytest.raises(ResumeError, match="val data"):
        trainer.fit(tuner, make_data(digit_rows(20), val_paths=digit_rows(8, seed=3)))


def test_each_completion_is_followed_by_that_of_the_next_prompt(tmp_path):
    rows = digit_rows(20, kind="label")
    data = make_data(rows, max_tokens=64)
    seen = []
    tuner = make(PreferenceTuner, loss="kto", lora=LORA)
    tuner.on_train_batch_start = lambda batch, batch_idx: seen.append(batch)
    fit(tmp_path, tuner, data, max_epochs=1, max_steps=-1)
    decode = character_tokenizer().decode
    for batch in seen:
        assert set(batch.context.completions.completions_per_example) == {2}
        rows_R = batch.context.labelled_target_R[: batch.context.num_labelled]
        texts = [
            decode(part, skip_special_tokens=True).replace(" ", "")
            for part in rows_R.split(batch.context.completions.count_C.long().tolist())
        ]
        # Rows 10 and 11 have the same prompt.
        places = [(number, 12 if number == 10 else (number + 1) % 20) for number in batch.numbers]
        expected = [rows[place]["completion"] for pair in places for place in pair]
        assert texts == expected


@pytest.mark.parametrize(
    ("options", "rows", "more"),
    [
        ({"loss": "kto"}, [{"prompt": "1", "completion": "2" * 20, "label": label} for label in (True, False)], {}),
        ({}, [{"prompt": "1" * 20, "chosen": "2", "rejected": "3"}] * 2, {"share_prompts": False}),
    ],
    ids=["kto", "repeated prompts"],
)
def test_a_row_that_fits_alone_only_is_answered_with_the_length_it_needs(tmp_path, options, rows, more):
    run = {"tuner_class": PreferenceTuner, "lora": LORA, **options}
    with pytest.raises(DataError, match=r"Raise max_tokens to \d+") as caught:
        fit(tmp_path, make(**run), make_data(rows, max_tokens=32, too_long="truncate", **more), max_steps=1)
    needed = int(re.search(r"to (\d+)", str(caught.value))[1])
    fit(tmp_path, make(**run), make_data(rows, max_tokens=needed, **more), max_steps=1)


LABELLED = digit_rows(8, kind="label")
ROLLOUTS = [
    {"prompt": "1", "completions": ["2"] * (1 + number % 2), "rewards": [1.0] * (1 + number % 2)} for number in range(8)
]


@pytest.mark.parametrize(
    ("tuner_class", "options", "rows", "message"),
    [
        (
            PreferenceTuner,
            {"loss": "kto"},
            [{**row, "label": True} for row in LABELLED],
            "All 8 rows .* the label true",
        ),
        (PreferenceTuner, {"loss": "kto"}, [{**row, "label": False} for row in LABELLED], "the label false"),
        (
            PreferenceTuner,
            {},
            [{**row, "margin": 1.0} for row in digit_rows(8)],
            "margin, which PreferenceTuner does not",
        ),
        (PolicyTuner, {}, ROLLOUTS, "4 of 8 rows .* one completion"),
        (PolicyTuner, {"advantage": "given"}, ROLLOUTS, None),
        (RewardTuner, {}, [{**row, "margin": 1.0} for row in digit_rows(8)], None),
    ],
)
def test_scores_without_an_effect_are_warned_of_once(tmp_path, tuner_class, options, rows, message):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(tmp_path, make(tuner_class, lora=LORA, **options), make_data(rows), max_epochs=2, max_steps=-1)
    found = [str(one.message) for one in caught if "of the training data have" in str(one.message)]
    assert len(found) == (message is not None)
    assert message is None or re.search(message, found[0])


@pytest.mark.parametrize("kind", ["dpo, adapters", "reward", "policy", "kto"])
def test_completions_are_predicted_through_the_trainer(tmp_path, kind):
    tuner, data = make_kind(kind, tmp_path)
    trainer = fit(tmp_path, tuner, data, max_steps=1)
    batches = list(data.val_dataloader()) + list(data.whole_stream("train"))
    found = trainer.predict(tuner, dataloaders=DataLoader(batches, batch_size=None))
    assert [len(value) for value in found] == [batch.context.completions.num_completions for batch in batches]
    assert all(value.isfinite().all() for value in found)


@pytest.mark.parametrize("kind", ["plain", "distillation"])
def test_documents_are_predicted_through_the_trainer(tmp_path, kind):
    if kind == "plain":
        tuner, data = make(FineTuner), make_data([{"text": row["prompt"]} for row in digit_rows(20)], val_share=0.4)
    else:
        tuner, data = make_kind(kind, tmp_path)
    trainer = fit(tmp_path, tuner, data, max_steps=1)
    (batch,), (found,) = list(data.val_dataloader()), trainer.predict(tuner, dataloaders=data.val_dataloader())
    model, start, expected = tuner.model.eval(), 0, []
    for length in batch.context.lengths:
        ids = batch["input_ids"][:, start : start + length]
        log_probs = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        expected.append(log_probs.gather(1, ids[0, 1:, None]).sum())
        start += length
    assert torch.allclose(found, torch.stack(expected).detach(), atol=1e-4)


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_validated_rollouts_count_by_what_each_mean_is_over(tmp_path, loss):
    rows = [
        {
            "prompt_ids": [3],
            "completion_ids": [[5], *([6] * size for size in sizes)],
            "rewards": [1.0, *(0.1 * size for size in sizes)],
            "log_probs": [[-1], *([-2] * size for size in sizes)],
        }
        for sizes in ((1,), (9,), (4, 2))
    ]
    found = []
    for max_tokens in (64, 16):
        torch.manual_seed(0)
        tuner = make(
            PolicyTuner, loss=loss, advantage="given", kl_weight=0.1, lora={**LORA, "init_lora_weights": False},
            reference="adapters_off",
        )  # fmt: skip
        data = make_data(rows, val_paths=rows, max_tokens=max_tokens)
        found.append(quiet_trainer(tmp_path, strategy=FastFTStrategy()).validate(tuner, data, verbose=False)[0])
    assert found[0].keys() == found[1].keys()
    assert all(found[1][name] == pytest.approx(value, rel=1e-5) for name, value in found[0].items())
