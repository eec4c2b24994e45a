"""TRL's GKDTrainer and DistillationTrainer against our loop: samples, losses and weights of whole runs, from one student and its seeds.

TRL trains the rows of our rounds in our order, and samples where ours sampled.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from transformers.optimization import get_constant_schedule

from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.distillation import DistillationTuner
from lightning_fastft.training.rollouts import RolloutDataModule
from lightning_fastft.training.samplers import FunctionSampler, sample_with_model
from tests.support.training_parts import quiet_trainer
from tests.training.test_on_policy_distillation import make_small_teacher
from tests.training.test_rollouts import character_tokenizer
from tests.training.test_trl_loop import BOUND, RATE, STEPS, TheirRecord, make_model, trained_weights

pytest.importorskip("trl", minversion="1.15")

LONGEST, ROUND = 5, 4
TEXTS = [f"{a}+{b}=" + "1" * b for a in range(4) for b in range(3)]
# A prompt is what the user says and "="; an answer ends with the end-of-text token.
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% if message['role'] == 'user' %}={% else %}<eos>{% endif %}"
    "{% endfor %}"
)


def make_rows(*, length):
    """Prompts with an answer of a length, or of several lengths for None; the end of text is one of its tokens."""
    rows = []
    for number, text in enumerate(TEXTS):
        answer = text[0] * ((2 + number % 3 if length is None else length) - 1)
        chat = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        rows.append({"prompt": chat[:1], "completion": chat[1:]})
    return rows


def write(prompts):
    """Completions of one length without an end."""
    return [[2 + (sum(prompt) + 3 * place) % 10 for place in range(LONGEST)] for prompt in prompts]


class Record(Callback):
    """Our rounds (prompt, completion), what was sampled of each with its seed, and losses and weights after each step."""

    def __init__(self):
        self.weights, self.losses, self.rounds, self.seeds = [], [], [], []
        self.sampled = []

    def watch(self, data):
        own_round, own_sampler = data._sample_round, data.sampler

        def sample(tuner, prompts, **options):
            self.seeds[-1] = options["seed"]
            self.sampled[-1] = [list(prompt) for prompt in prompts]
            return own_sampler(tuner, prompts, **options)

        def sample_round(number):
            self.seeds.append(None)
            self.sampled.append([])
            documents = own_round(number)
            ids = [document.input_ids.tolist() for document in documents]
            ends = [document.segment_lengths[0] for document in documents]
            self.rounds.append([(row[:end], row[end:]) for row, end in zip(ids, ends)])
            return documents

        data._sample_round, data.sampler = sample_round, sample
        return data

    def on_train_batch_end(self, trainer, tuner, *args):
        self.losses.append(float(trainer.logged_metrics["train_loss"]))
        if trainer.global_step > len(self.weights):
            self.weights.append(trained_weights(tuner.model))


class PlainDivergence:
    """The fused divergence of TRL's DistillationTrainer by the formula of its GKDTrainer."""

    @staticmethod
    def apply(student, student_head, _, teacher, teacher_head, __, beta, temperature, *___):
        from trl.experimental.gkd import GKDTrainer

        logits, other = student @ student_head.T, teacher @ teacher_head.T
        divergence = GKDTrainer.generalized_jsd_loss(
            logits, other, beta=beta, temperature=temperature, reduction="none"
        )
        return divergence.sum(-1), torch.zeros(len(student))


def run_ours(
    folder, model, tokenizer, rows, *, accumulate, share, temperature, sampler, sampling=None,
    divergence_temperature=1.0, **options,
):  # fmt: skip
    tuner = DistillationTuner(
        model, teacher=make_small_teacher(), tokenizer=tokenizer, dtype="float32", scheduler=get_constant_schedule,
        temperature=divergence_temperature, optimizer=lambda groups: torch.optim.SGD(groups, lr=RATE), **options,
    )  # fmt: skip
    data = RolloutDataModule(
        rows, sampler=sampler, sampled_share=share, num_completions=1, prompts_per_round=ROUND, max_new_tokens=LONGEST,
        temperature=temperature, sampling_options=sampling, max_tokens=512 if accumulate == 1 else 30,
    )  # fmt: skip
    record = Record()
    quiet_trainer(
        folder, max_steps=STEPS, strategy=FastFTStrategy(), accumulate_grad_batches=accumulate, callbacks=[record],
        log_every_n_steps=1,
    ).fit(tuner, record.watch(data))  # fmt: skip
    return record


def run_trls(folder, monkeypatch, model, tokenizer, record, rows, *, size, share, temperature, beta, counts_sampled):
    from datasets import Dataset
    from trl.experimental.gkd import GKDConfig, GKDTrainer, gkd_trainer

    texts = {tuple(tokenizer(row["prompt"][0]["content"] + "=")["input_ids"]): row for row in rows}
    pairs = [pair for pairs in record.rounds for pair in pairs]
    chats = [texts[tuple(prompt)]["prompt"] + texts[tuple(prompt)]["completion"] for prompt, _ in pairs]
    is_sampled = [prompt in asked for pairs, asked in zip(record.rounds, record.sampled) for prompt, _ in pairs]
    found = TheirRecord()
    config = GKDConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, per_device_train_batch_size=size,
        gradient_accumulation_steps=ROUND // size, learning_rate=RATE, max_steps=STEPS, lr_scheduler_type="constant",
        max_grad_norm=0.0, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
        gradient_checkpointing=False, train_sampling_strategy="sequential", lmbda=share, beta=beta,
        temperature=temperature, max_new_tokens=LONGEST,
    )  # fmt: skip
    trainer = GKDTrainer(
        model=model, teacher_model=make_small_teacher(), args=config, processing_class=tokenizer, callbacks=[found],
        train_dataset=Dataset.from_list([{"messages": chat} for chat in chats]),
    )  # fmt: skip
    trainer.optimizer = torch.optim.SGD([each for each in trainer.model.parameters() if each.requires_grad], lr=RATE)
    own_outputs, own_count = trainer.generate_on_policy_outputs, trainer._get_num_items_in_batch
    # TRL draws for a whole micro-batch.
    drawn, place = iter(is_sampled[::size]), iter(range(0, len(pairs), size))
    monkeypatch.setattr(gkd_trainer.random, "random", lambda: 0.0 if next(drawn) else 1.0)

    def generate(model, inputs, generation_config):
        begin = at[0]
        written = [completion for _, completion in pairs[begin : begin + size]]
        if size == ROUND:
            # Both sample the same prompts at once.
            torch.manual_seed(record.seeds[begin // ROUND])
        else:
            (completion,) = written
            model = SimpleNamespace(
                generate=lambda input_ids, **_: SimpleNamespace(
                    sequences=torch.cat([input_ids, torch.tensor([completion])], dim=1)
                )
            )
        ids, mask, labels = own_outputs(model, inputs, generation_config)
        assert [row[row != -100].tolist() for row in labels] == written
        return ids, mask, labels

    own_step, at = trainer.training_step, [0]

    def training_step(*args, **options):
        at[0] = next(place)
        return own_step(*args, **options)

    def count(batches, device):
        given = own_count(batches, device)
        if not counts_sampled:
            return given
        pairs = record.rounds[trainer.state.global_step]
        return torch.tensor(sum(len(completion) for _, completion in pairs))

    monkeypatch.setattr(trainer, "training_step", training_step)
    monkeypatch.setattr(trainer, "generate_on_policy_outputs", generate)
    monkeypatch.setattr(trainer, "_get_num_items_in_batch", count)
    trainer.train()
    return found


@pytest.mark.covering
@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "size", "accumulate", "temperature", "options", "beta", "has_adapters"),
    [
        (1.0, ROUND, 1, 0.8, {"kind": "jsd", "beta": 0.3}, 0.3, False),
        (1.0, ROUND, 1, 1.0, {"kind": "reverse_kl"}, 1.0, True),
        (1.0, 1, 2, 1.0, {"kind": "forward_kl"}, 0.0, False),
        (0.5, 1, 1, 0.8, {"kind": "jsd", "beta": 0.9}, 0.9, False),
        (0.5, 1, 2, 1.0, {"kind": "reverse_kl"}, 1.0, False),
        (0.0, ROUND, 1, 1.0, {"kind": "forward_kl"}, 0.0, False),
        (0.0, 1, 2, 1.0, {"kind": "jsd"}, 0.5, True),
    ],
)
@pytest.mark.parametrize("is_even", [False, True], ids=["lengths", "one length"])
def test_runs_are_trls(
    tmp_path, monkeypatch, share, size, accumulate, temperature, options, beta, has_adapters, is_even
):  # fmt: skip
    """TRL divides sampled completions by the tokens of those in the rows; both count alike if all have one length."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    model, rows = make_model(has_adapters=has_adapters), make_rows(length=LONGEST if is_even else None)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    if is_even:
        size, sampler = 1, FunctionSampler(write)
    else:
        sampler = sample_with_model
    record = run_ours(
        tmp_path, copy.deepcopy(model), tokenizer, rows, accumulate=accumulate, share=share, temperature=temperature,
        sampler=sampler, **options,
    )  # fmt: skip
    found = run_trls(
        tmp_path, monkeypatch, model, tokenizer, record, rows, size=size, share=share, temperature=temperature,
        beta=beta, counts_sampled=not is_even,
    )  # fmt: skip
    assert_same(record, found, has_losses=accumulate == 1)


def assert_same(record, found, *, has_losses):
    assert len(record.weights) == len(found.weights) == len(record.rounds) == STEPS
    for step, (one, other) in enumerate(zip(record.weights, found.weights)):
        assert one.keys() == other.keys()
        assert max(float((one[name] - other[name]).abs().max()) for name in one) < BOUND, step
    first, last = record.weights[0], record.weights[-1]
    assert max(float((last[name] - first[name]).abs().max()) for name in first) > 1e3 * BOUND
    if has_losses:
        assert record.losses == pytest.approx([logs["loss"] for logs in found.logged if "loss" in logs], rel=1e-4)


@pytest.mark.covering
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "beta", "accumulate", "temperature", "sampling"),
    [
        ({"kind": "jsd", "beta": 0.3}, 0.3, 1, 0.8, {}),
        ({"kind": "reverse_kl"}, 1.0, 2, 1.0, {"top_p": 0.8, "top_k": 8, "min_p": 0.02}),
        ({"kind": "forward_kl"}, 0.0, 1, 1.5, {}),
    ],
)
def test_runs_are_those_of_trls_distillation_trainer(
    tmp_path, monkeypatch, options, beta, accumulate, temperature, sampling
):
    """Its temperature is that of the sampling and of the divergence."""
    from datasets import Dataset
    from trl import DistillationConfig, DistillationTrainer
    from trl.trainer import distillation_trainer

    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    model, rows = make_model(has_adapters=False), make_rows(length=None)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    record = run_ours(
        tmp_path, copy.deepcopy(model), tokenizer, rows, accumulate=accumulate, share=1.0, temperature=temperature,
        sampler=sample_with_model, sampling=sampling, divergence_temperature=temperature, **options,
    )  # fmt: skip
    texts = {tuple(tokenizer(row["prompt"][0]["content"] + "=")["input_ids"]): row["prompt"] for row in rows}
    prompts = [{"prompt": texts[tuple(prompt)]} for pairs in record.rounds for prompt, _ in pairs]
    found = TheirRecord()
    config = DistillationConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, per_device_train_batch_size=ROUND // accumulate,
        gradient_accumulation_steps=accumulate, learning_rate=RATE, max_steps=STEPS, lr_scheduler_type="constant",
        max_grad_norm=0.0, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, shuffle_dataset=False,
        gradient_checkpointing=False, beta=beta, temperature=temperature, max_completion_length=LONGEST, **sampling,
    )  # fmt: skip
    trainer = DistillationTrainer(
        model=model, teacher_model=make_small_teacher(), args=config, processing_class=tokenizer, callbacks=[found],
        train_dataset=Dataset.from_list(prompts),
    )  # fmt: skip
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=RATE)
    own_turn, rounds = trainer._generate_single_turn, iter(zip(record.seeds, record.rounds))

    def generate(prompt_ids, *args):
        seed, pairs = next(rounds)
        torch.manual_seed(seed)
        written = own_turn(prompt_ids, *args)
        assert list(zip(prompt_ids, written)) == pairs
        return written

    monkeypatch.setattr(distillation_trainer, "ChunkedDivergenceFunction", PlainDivergence)
    monkeypatch.setattr(distillation_trainer, "shuffle_sequence_dict", lambda batch: batch)
    monkeypatch.setattr(trainer, "_generate_single_turn", generate)
    trainer.train()
    assert_same(record, found, has_losses=accumulate == 1)
