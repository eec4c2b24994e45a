"""Whole runs of TRL's trainers against ours: weights after each step, logged losses, and values of each validation.

Both begin with one model and read the same files. TRL trains the rows of our micro-batches, padded. Where a loss is a
mean over examples, it trains a window as one batch: its mean over a window gives each micro-batch the same weight.
"""

import copy
import importlib
import itertools
import json
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from peft import LoraConfig, get_peft_model
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.optimization import get_cosine_schedule_with_warmup

from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.distillation import DistillationTuner
from lightning_fastft.training.fine_tuner import FineTuner
from lightning_fastft.training.preference import PreferenceTuner
from lightning_fastft.training.reward import RewardTuner
from tests.packing.conftest import MARKED, build_tokenizer
from tests.support.sizes import sizes
from tests.support.training_parts import quiet_data, quiet_trainer
from tests.training.test_trl_loop import PlainHead, TheirRecord, trained_weights

pytest.importorskip("trl", minversion="1.15")

RATE, CLIP, DECAY, WARMUP, EPOCHS = 3e-2, 0.7, 0.1, 2, 2
# fp32: a step adds terms in another order. AdamW divides gradients by their own size, also those that are all rounding.
BOUND, ADAMW_BOUND = 1e-6, 1e-5
# Line breaks are in front of turns: TRL also trains what a template writes behind the last answer, and we do not.
START = "{{ '\n' if not (loop and loop.first) }}<|im_start|>"
TEMPLATE = MARKED.replace("{{ '\n' }}", "").replace("<|im_start|>", START)
VERSE = "what is two plus two the answer is four user says hello to all of them and then goes away"


def text(start, count):
    words = VERSE.split()
    return " ".join(words[(start * 5 + place * (1 + start % 3)) % len(words)] for place in range(count))


def turns(*contents):
    return [{"role": ("user", "assistant")[place % 2], "content": content} for place, content in enumerate(contents)]


def of_text(number):
    return {"text": text(number, 2 + number * 3 % 11)}


def of_chat(number):
    lengths = [1 + (number * 3 + place) % 5 for place in range(2 + 2 * (number % 3))]
    return {"messages": turns(*(text(number + 3 * place, length) for place, length in enumerate(lengths)))}


def of_completion(number):
    return {"prompt": text(number, 1 + number % 5), "completion": " " + text(number + 2, 1 + number * 2 % 7)}


def of_turns(number):
    asked, answered = text(number, 1 + number % 5), text(number + 2, 1 + number * 2 % 7)
    return {"prompt": turns(asked), "completion": [{"role": "assistant", "content": answered}]}


def of_pair(number):
    """Rows 0 and 1 have one prompt, and so on."""
    chosen, rejected = text(number + 2, 1 + number * 2 % 7), text(number + 5, 1 + number * 3 % 5)
    return {"prompt": text(number // 2, 1 + number // 2 % 5), "chosen": " " + chosen, "rejected": " " + rejected}


def of_margin(number):
    return {**of_pair(number), "margin": 0.1 * (number % 4)}


def of_chat_pair(number):
    row = of_pair(number)
    before = turns(text(number, 2), text(number + 1, 3)) if number % 3 == 0 else []
    answers = {name: [{"role": "assistant", "content": row[name].strip()}] for name in ("chosen", "rejected")}
    return {"prompt": [*before, *turns(row["prompt"])], **answers}


def of_label(number):
    row, is_liked = of_pair(number), number % 3 > 0
    return {"prompt": row["prompt"], "completion": row["chosen" if is_liked else "rejected"], "label": is_liked}


def pair_with_other_prompts(trainer):
    """Give KTO our mismatched completions: TRL takes the row before, also if it has the same prompt."""
    for name in ("train_dataset", "eval_dataset"):
        rows = getattr(trainer, name)
        completions = rows["completion_ids"]
        others = [completions[(place + 2) % len(rows)] for place in range(len(rows))]
        setattr(trainer, name, rows.remove_columns("KL_completion_ids").add_column("KL_completion_ids", others))


def drop_likelihood(trainer):
    """TRL's term of ORPO covers the prompt too, ours as in the paper the completion: the ratio alone is compared."""
    own = trainer.concatenated_forward
    trainer.concatenated_forward = lambda *inputs: (*own(*inputs)[:4], torch.zeros(()))


class Run(NamedTuple):
    tuner: type
    trainer: str
    row: Any
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    data: dict[str, Any] = {"max_tokens": 72}
    has_adapters: bool = True
    optimizer: Any = lambda groups: torch.optim.SGD(groups, lr=RATE)
    accumulate: int = 2
    adapt: Any = lambda trainer: None
    logged: tuple[str, str] = ("loss", "loss")


IN_ORDER, LONG = {"shuffle_dataset": False}, {"max_tokens": 128}
ANSWERS = {**IN_ORDER, "assistant_only_loss": True}
RUNS = {
    "chat": Run(FineTuner, "SFT", of_chat, {}, ANSWERS, LONG, has_adapters=False),
    "chat, AdamW": Run(FineTuner, "SFT", of_chat, {}, ANSWERS, LONG, optimizer=None),
    "completion": Run(FineTuner, "SFT", of_completion, {}, IN_ORDER),
    "turns": Run(FineTuner, "SFT", of_turns, {}, IN_ORDER, has_adapters=False),
    "text, cut": Run(
        FineTuner, "SFT", of_text, {}, {**IN_ORDER, "max_length": 14}, {"max_tokens": 14, "too_long": "truncate"},
    ),
    "DPO": Run(PreferenceTuner, "DPO", of_pair, logged=("log_prob_chosen", "logps/chosen")),
    "DPO, stored": Run(
        PreferenceTuner, "DPO", of_chat_pair, {"reference": "stored"}, {"precompute_ref_log_probs": True}, LONG,
        has_adapters=False, logged=("reward_margin", "rewards/margins"),
    ),
    "KTO": Run(
        PreferenceTuner, "KTO", of_label, {"loss": "kto", "desirable_weight": 1.3},
        {"desirable_weight": 1.3, "train_sampling_strategy": "sequential", "per_device_train_batch_size": 2},
        {"max_tokens": 256}, accumulate=1, adapt=pair_with_other_prompts, logged=("divergence", "kl"),
    ),
    "ORPO": Run(
        PreferenceTuner, "ORPO", of_pair, {"loss": "orpo", "sft_weight": 0.0}, {"max_length": 64},
        adapt=drop_likelihood, logged=("reward_accuracy", "rewards/accuracies"),
    ),
    "SimPO": Run(
        PreferenceTuner, "CPO", of_pair, {"loss": "simpo", "beta": 2.0},
        {"max_length": 64, "beta": 2.0, "loss_type": "simpo", "cpo_alpha": 0.0},
    ),
    "reward": Run(RewardTuner, "Reward", of_margin, has_adapters=False, logged=("score", "mean_reward")),
    "GKD": Run(
        DistillationTuner, "GKD", lambda number: of_chat(3 * number), {"kind": "jsd", "beta": 0.3},
        {"lmbda": 0.0, "beta": 0.3, "temperature": 1.0},
    ),
}  # fmt: skip


def make_tokenizer():
    tokenizer = build_tokenizer(chat_template=TEMPLATE)
    tokenizer.pad_token = "<s>"
    return tokenizer


def make_model(*, seed=0, has_adapters=False):
    """A model with biases, and norms other than 1."""
    torch.manual_seed(seed)
    numbers = sizes(vocab=304, width=32, inner=48, layers=2, heads=4, key_heads=2, positions=256)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **numbers, tie_word_embeddings=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim > 1 else 0.1))
    targets = ["q_proj", "v_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets)) if has_adapters else model


class Record(Callback):
    """Our weights after each step; rows, number of loss terms and values of each micro-batch; values of validations."""

    def __init__(self):
        self.weights, self.parts, self.evaluated = [], [], []

    def on_train_batch_end(self, trainer, tuner, outputs, batch, batch_idx):
        is_done, (_, rows) = trainer.global_step > len(self.weights), trainer.datamodule.find_examples(batch.index)
        count = batch.context.num_labelled if batch.context.completions is None else len(rows)
        self.parts.append((rows, count, float(trainer.logged_metrics["train_loss"]), is_done))
        if is_done:
            self.weights.append(trained_weights(tuner.model))

    def on_validation_end(self, trainer, tuner):
        self.evaluated.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def windows(self):
        ends = [place + 1 for place, part in enumerate(self.parts) if part[-1]]
        return [self.parts[begin:end] for begin, end in zip([0, *ends], ends)]


def run_ours(folder, tuner, run):
    record = Record()
    quiet_trainer(
        folder, max_steps=-1, max_epochs=EPOCHS, strategy=FastFTStrategy(), accumulate_grad_batches=run.accumulate,
        gradient_clip_val=CLIP, log_every_n_steps=1, callbacks=[record], num_sanity_val_steps=0,
    ).fit(tuner, quiet_data(str(folder / "train.jsonl"), val_paths=str(folder / "val.jsonl"), **run.data))  # fmt: skip
    return record


class OurBatches:
    """Each pass yields the batches of the next epoch."""

    def __init__(self, batches):
        self.num_batches, self.coming = len(batches) // EPOCHS, iter(batches)

    def __len__(self):
        return self.num_batches

    def __iter__(self):
        return itertools.islice(self.coming, self.num_batches)


def make_trainer(folder, model, run, *, accumulate, **others):
    from datasets import load_dataset

    folders = {name: f"trl.experimental.{name.lower()}" for name in ("ORPO", "CPO", "GKD")}
    found = importlib.import_module(folders.get(run.trainer, "trl"))
    config = getattr(found, f"{run.trainer}Config")(
        output_dir=str(folder), use_cpu=True, bf16=False, learning_rate=RATE, num_train_epochs=EPOCHS,
        gradient_accumulation_steps=accumulate, weight_decay=DECAY, max_grad_norm=CLIP, logging_steps=1, report_to=[],
        save_strategy="no", disable_tqdm=True, gradient_checkpointing=False, eval_strategy="epoch",
        per_device_eval_batch_size=64, optim="sgd" if run.optimizer else "adamw_torch", **run.theirs,
    )  # fmt: skip
    files = {name: str(folder / f"{name}.jsonl") for name in ("train", "val")}
    data = load_dataset("json", data_files=files, cache_dir=str(folder / "cache"))
    return getattr(found, f"{run.trainer}Trainer")(
        model=model, args=config, train_dataset=data["train"], eval_dataset=data["val"],
        processing_class=make_tokenizer(), **others,
    )  # fmt: skip


def run_trls(monkeypatch, trainer, batches):
    found = TheirRecord()
    trainer.add_callback(found)
    trainer._set_signature_columns_if_needed()
    rows = trainer.train_dataset
    if trainer.args.remove_unused_columns:
        rows = rows.select_columns([name for name in trainer._signature_columns if name in rows.column_names])
    loader = DataLoader(rows, batch_sampler=OurBatches(batches), collate_fn=trainer.data_collator)
    monkeypatch.setattr(trainer, "get_train_dataloader", lambda: trainer.accelerator.prepare(loader))

    def create_scheduler(num_training_steps, optimizer=None):
        # Our warm-up is that of one more step without the first, whose rate is 0.
        longer = get_cosine_schedule_with_warmup(trainer.optimizer, WARMUP, num_training_steps + 1)
        trainer.lr_scheduler = LambdaLR(trainer.optimizer, lambda step: longer.lr_lambdas[0](step + 1))

    monkeypatch.setattr(trainer, "create_scheduler", create_scheduler)
    trainer.train()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_runs_are_trls(tmp_path, monkeypatch, name):
    from trl.trainer import utils

    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", PlainHead)
    run, others = RUNS[name], {}
    for file, numbers in (("train", range(20)), ("val", range(20, 24))):
        (tmp_path / f"{file}.jsonl").write_text("\n".join(json.dumps(run.row(number)) for number in numbers))
    model = make_model(has_adapters=run.has_adapters)
    theirs, mine = copy.deepcopy(model), {}
    if run.tuner is DistillationTuner:
        mine["teacher"], others["teacher_model"] = make_model(seed=1), make_model(seed=1)
    tuner = run.tuner(
        model, tokenizer=make_tokenizer(), dtype="float32", learning_rate=RATE, weight_decay=DECAY, warmup_steps=WARMUP,
        optimizer=run.optimizer, **run.ours, **mine,
    )  # fmt: skip
    if run.tuner is RewardTuner:
        tuner.configure_model()
        theirs.config.update({"num_labels": 1, "pad_token_id": make_tokenizer().pad_token_id})
        theirs = AutoModelForSequenceClassification.from_config(theirs.config)
        theirs.load_state_dict({key: value for key, value in model.state_dict().items() if "lm_head" not in key})
    record = run_ours(tmp_path, tuner, run)
    windows = record.windows()
    batches, accumulate = [rows for rows, *_ in record.parts], run.accumulate
    assert len(windows) > 3
    assert max(map(len, batches)) > 1
    if run.tuner in (PreferenceTuner, RewardTuner):
        batches, accumulate = [[row for rows, *_ in window for row in rows] for window in windows], 1
    trainer = make_trainer(tmp_path, theirs, run, accumulate=accumulate, **others)
    run.adapt(trainer)
    found = run_trls(monkeypatch, trainer, batches)
    bound = BOUND if run.optimizer else ADAMW_BOUND
    for step, (one, other) in enumerate(zip(record.weights, found.weights, strict=True)):
        assert one.keys() == other.keys()
        assert max(float((one[key] - other[key]).abs().max()) for key in one) < bound, step
    assert max(float((one[key] - record.weights[0][key]).abs().max()) for key in one) > 1e3 * bound
    ours = [sum(count * loss for _, count, loss, _ in window) / sum(part[1] for part in window) for window in windows]
    assert ours == pytest.approx([logs["loss"] for logs in found.logged if "loss" in logs], rel=1e-5, abs=2e-6)
    evaluated = [logs for logs in found.logged if "eval_loss" in logs]
    assert len(evaluated) == EPOCHS
    for values, logs in zip(record.evaluated, evaluated, strict=True):
        for name, other in (("loss", "loss"), run.logged):
            assert values[f"val_{name}"] == pytest.approx(logs[f"eval_{other}"], rel=1e-5, abs=1e-5), name
