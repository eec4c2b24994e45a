"""TRL's GRPOTrainer against our loop: samples, weights and logged values of whole runs, from one model and its seeds.

Both sample with the same seeds. TRL then trains its groups in the order of our micro-batches, one in each, unshuffled.
"""

import copy

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback
from transformers.optimization import get_constant_schedule

from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.policy import PolicyTuner
from lightning_fastft.training.rollouts import RolloutDataModule
from lightning_fastft.training.samplers import sample_with_model
from tests.support.training_parts import quiet_trainer
from tests.training.test_rollouts import CONFIG, character_tokenizer

pytest.importorskip("trl", minversion="1.15")

SIZE, LONGEST, STEPS, RATE = 4, 6, 8, 0.1
TEXTS = [f"{a}+{b}=" + "1" * b for a in range(4) for b in range(2)]
# Tokens at the start of a prompt that name it.
NAMING = 3
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
# fp32: after a step the weights differ by the order of sums, which later steps carry on.
BOUND = 1e-6


def make_model(*, has_adapters):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))
    with torch.no_grad():
        for parameter in model.parameters():
            # Of a model at its start all tokens are about as likely.
            parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
    targets = ["q_proj", "v_proj", "o_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_modules=targets)) if has_adapters else model


def score(*, completions, **columns):
    # TRL gives messages where the prompt is messages.
    texts = [completion if isinstance(completion, str) else completion[0]["content"] for completion in completions]
    return [text.count("1") - text.count("2") + 0.1 * len(text) for text in texts]


def only_twos(*, completions, **columns):
    """Scores that do not apply to completions without a 2."""
    texts = [completion if isinstance(completion, str) else completion[0]["content"] for completion in completions]
    return [2.0 * text.count("2") if "2" in text else None for text in texts]


def all_but_the_first(*, completions, **columns):
    found = score(completions=completions)
    return [None if number % SIZE == 0 else value for number, value in enumerate(found)]


def trained_weights(model):
    return {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and ".ref." not in name
    }


class Record(Callback):
    """Our weights and logged values after each step, the prompt of each micro-batch, and each round as it was asked."""

    def __init__(self):
        self.weights, self.logged, self.trained, self.rounds = [], [], [], []

    def sample(self, tuner, prompts, **options):
        groups = sample_with_model(tuner, prompts, **options)
        written = [(list(prompt), [sampled.input_ids for sampled in group]) for prompt, group in zip(prompts, groups)]
        self.rounds.append((options["seed"], written))
        return groups

    def on_train_batch_start(self, trainer, tuner, batch, batch_idx):
        self.trained.append(batch["input_ids"].flatten()[:NAMING].tolist())

    def on_train_batch_end(self, trainer, tuner, *args):
        if trainer.global_step > len(self.weights):
            self.weights.append(trained_weights(tuner.model))
            self.logged.append({name: float(value) for name, value in trainer.logged_metrics.items()})


class TheirRecord(TrainerCallback):
    def __init__(self):
        self.weights, self.logged = [], []

    def on_step_end(self, args, state, control, *, model, **_):
        self.weights.append(trained_weights(model))

    def on_log(self, args, state, control, *, logs, **_):
        self.logged.append(logs)


class PlainHead:
    """TRL's fused head, whose kernel has no CPU, by its formula."""

    @staticmethod
    def apply(hidden, weight, bias, labels, temperature, size, soft_cap, scale, *_):
        logits = torch.nn.functional.linear(hidden, weight, bias) * scale
        logits = (logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)) / temperature
        log_probs = torch.log_softmax(logits, dim=-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1).detach()
        mean, is_top1 = logits.mean(-1).detach(), logits.argmax(-1) == labels
        return log_probs.gather(-1, labels[:, None])[:, 0], entropy, None, mean, is_top1


def run_ours(
    folder, model, tokenizer, rows, *, groups, accumulate, one_by_one, temperature, rewards=score, weights=None,
    sampling=None, mask_truncated=False, **options,
):  # fmt: skip
    tuner = PolicyTuner(
        model, tokenizer=tokenizer, dtype="float32", temperature=temperature, scheduler=get_constant_schedule,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=RATE), **options,
    )  # fmt: skip
    record = Record()
    data = RolloutDataModule(
        rows, rewards=rewards, reward_weights=weights, sampler=record.sample, num_completions=SIZE,
        prompts_per_round=groups, max_new_tokens=LONGEST, temperature=temperature, sampling_options=sampling,
        max_tokens=40 if one_by_one else 512, mask_truncated=mask_truncated,
    )  # fmt: skip
    quiet_trainer(
        folder, max_steps=STEPS, strategy=FastFTStrategy(), accumulate_grad_batches=accumulate, callbacks=[record],
        log_every_n_steps=1,
    ).fit(tuner, data)  # fmt: skip
    return record


def in_our_order(record, *, one_by_one):
    """Return the groups of each round in the order of our micro-batches."""
    if not one_by_one:
        return [groups for _, groups in record.rounds]
    rounds = []
    for number, (_, groups) in enumerate(record.rounds):
        trained = record.trained[number * len(groups) : (number + 1) * len(groups)]
        rounds.append(sorted(groups, key=lambda group: trained.index(group[0][:NAMING])))
    return rounds


def run_trls(
    folder, monkeypatch, model, tokenizer, record, rows_of, *, groups, accumulate, one_by_one, temperature,
    rewards=score, weights=None, sampling=None, rate=RATE, **options,
):  # fmt: skip
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer import grpo_trainer, utils

    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", PlainHead)
    monkeypatch.setattr(grpo_trainer, "shuffle_sequence_dict", lambda batch: batch)
    rounds, found = in_our_order(record, one_by_one=one_by_one), TheirRecord()
    sizes = (SIZE, groups) if one_by_one else (groups * SIZE, 1)
    config = GRPOConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, per_device_train_batch_size=sizes[0],
        steps_per_generation=sizes[1], gradient_accumulation_steps=accumulate, num_generations=SIZE,
        max_completion_length=LONGEST, temperature=temperature, learning_rate=RATE, max_steps=STEPS,
        lr_scheduler_type="constant", max_grad_norm=0.0, shuffle_dataset=False, logging_steps=1, report_to=[],
        save_strategy="no", disable_tqdm=True, gradient_checkpointing=False, reward_weights=weights,
        **{"loss_type": "grpo", "use_bias_correction_kl": False, **options, **(sampling or {})},
    )  # fmt: skip
    prompts = Dataset.from_list([rows_of(prompt) for groups in rounds for prompt, _ in groups])
    trainer = GRPOTrainer(
        model=model, processing_class=tokenizer, reward_funcs=rewards, args=config, train_dataset=prompts,
        callbacks=[found],
    )  # fmt: skip
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    trainer.optimizer = torch.optim.SGD(trained, lr=rate)
    own_turn, number = trainer._generate_single_turn, iter(range(len(rounds)))

    def generate(prompt_ids, images, fields, num_generations, *args):
        place = next(number)
        seed, asked = record.rounds[place]
        assert [list(ids) for ids in prompt_ids[::SIZE]] == [prompt for prompt, _ in rounds[place]]
        torch.manual_seed(seed)
        written, _ = own_turn(
            [prompt for prompt, _ in asked for _ in range(SIZE)], images, fields, num_generations, *args
        )
        assert written == [completion for _, group in asked for completion in group], place
        return [completion for _, group in rounds[place] for completion in group], None

    monkeypatch.setattr(trainer, "_generate_single_turn", generate)
    trainer.train()
    return found


NAMES = {
    "train_loss": "loss", "train_entropy": "entropy", "train_clip_share": "clip_ratio/region_mean",
    "train_divergence": "kl", "train_reward": "reward", "train_length": "completions/mean_length",
    "train_reward_deviation": "reward_std", "train_equal_reward_share": "frac_reward_zero_std",
    "train_truncated_share": "completions/clipped_ratio",
}  # fmt: skip


# Of these TRL logs the mean over a round, and its deviation of rewards is that of all groups of a round together.
OF_ROUNDS = ("train_reward", "train_length", "train_equal_reward_share", "train_truncated_share")


@pytest.mark.covering
@pytest.mark.slow
@pytest.mark.parametrize("is_chat", [False, True], ids=["text", "chat"])
@pytest.mark.parametrize(
    ("ours", "theirs", "groups", "accumulate", "one_by_one"),
    [
        ({}, {}, 1, 1, True),
        ({}, {}, 4, 1, True),
        ({}, {}, 4, 2, True),
        ({"ratio": "sequence"}, {"importance_sampling_level": "sequence"}, 4, 1, True),
        ({"loss": "dapo", "clip_high": 0.28}, {"loss_type": "dapo", "epsilon_high": 0.28}, 4, 4, True),
        ({"loss": "dapo", "kl_weight": 0.2}, {"loss_type": "dapo", "beta": 0.2}, 4, 1, False),
        (
            {"loss": "dr_grpo", "max_completion_tokens": LONGEST, "advantage": "centred"},
            {"loss_type": "dr_grpo", "scale_rewards": "none"}, 4, 2, True,
        ),
        ({"kl_weight": 0.2}, {"beta": 0.2}, 4, 1, True),
        ({"kl_weight": 0.2, "unbiased_kl": True}, {"beta": 0.2, "use_bias_correction_kl": True}, 4, 1, True),
        ({"loss": "cispo", "clip_high": 0.1}, {"loss_type": "cispo", "epsilon_high": 1.1}, 4, 4, True),
        ({"loss": "sapo"}, {"loss_type": "sapo"}, 4, 1, True),
        ({"dual_clip": 1.2}, {"delta": 1.2}, 4, 1, True),
        ({"mask_truncated": True}, {"mask_truncated_completions": True}, 1, 1, True),
        (
            {"mask_truncated": True, "loss": "dapo", "kl_weight": 0.2},
            {"mask_truncated_completions": True, "loss_type": "dapo", "beta": 0.2}, 4, 1, False,
        ),
        (
            {"mask_truncated": True, "ratio": "sequence"},
            {"mask_truncated_completions": True, "importance_sampling_level": "sequence"}, 4, 2, True,
        ),
    ],
)  # fmt: skip
def test_runs_are_trls(tmp_path, monkeypatch, ours, theirs, groups, accumulate, one_by_one, is_chat):
    common = {"groups": groups, "accumulate": accumulate, "one_by_one": one_by_one}
    compare_runs(tmp_path, monkeypatch, ours, theirs, is_chat=is_chat, **common)


@pytest.mark.covering
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "groups", "accumulate"),
    [
        ({"sampling": {"top_p": 0.8, "top_k": 8, "min_p": 0.02}}, 4, 1),
        # TRL penalises the padding token in rows that are padded, so there is one prompt in a batch.
        ({"sampling": {"repetition_penalty": 1.5}}, 1, 1),
        ({"rewards": [score, only_twos], "weights": [1.0, -0.5]}, 4, 2),
    ],
    ids=["filters", "penalty", "rewards"],
)
def test_runs_with_sampling_options_and_weighted_rewards_are_trls(tmp_path, monkeypatch, options, groups, accumulate):
    common = {"groups": groups, "accumulate": accumulate, "one_by_one": True, "is_chat": False}
    record = compare_runs(tmp_path, monkeypatch, {}, {}, **common, **options)
    plain = run_ours(
        tmp_path, make_model(has_adapters=False), character_tokenizer(), [{"prompt": text} for text in TEXTS],
        groups=groups, accumulate=accumulate, one_by_one=True, temperature=1.0,
    )  # fmt: skip
    assert any((one[name] != other[name]).any() for one, other in zip(record.weights, plain.weights) for name in one)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:All reward functions returned None")
def test_completions_without_a_reward_are_left_out_where_trl_counts_them_in_the_mean(tmp_path, monkeypatch):
    """TRL divides the loss by them too: here by 4 for 3 that have a reward, in every step."""
    common = {"groups": 4, "accumulate": 1, "one_by_one": False, "is_chat": False}
    theirs = {"rate": RATE * SIZE / (SIZE - 1)}
    compare_runs(tmp_path, monkeypatch, {}, theirs, rewards=all_but_the_first, **common)


def compare_runs(tmp_path, monkeypatch, ours, theirs, *, groups, accumulate, one_by_one, is_chat, **shared):
    tokenizer, temperature = character_tokenizer(), 0.8 if is_chat else 1.0
    model = make_model(has_adapters="kl_weight" in ours)
    if is_chat:
        tokenizer.chat_template = TEMPLATE
    names = NAMES
    if "mask_truncated" in ours:
        # A sampled padding token ends no text; TRL takes it for an end.
        tokenizer.pad_token = tokenizer.eos_token
        names = {**NAMES, "train_length": "completions/mean_terminated_length"}
    rows = [{"prompt": [{"role": "user", "content": text}] if is_chat else text} for text in TEXTS]
    common = {"groups": groups, "accumulate": accumulate, "one_by_one": one_by_one, "temperature": temperature}
    common |= shared
    record = run_ours(tmp_path, copy.deepcopy(model), tokenizer, rows, **common, **ours)

    def row_of(prompt):
        text = "".join(tokenizer.convert_ids_to_tokens(prompt))
        return rows[TEXTS.index(text[:-1] if is_chat else text)]

    found = run_trls(tmp_path, monkeypatch, model, tokenizer, record, row_of, **common, **theirs)
    is_logged = accumulate == 1 and "rate" not in theirs
    assert len(record.weights) == len(found.weights) == STEPS
    for step, (one, other) in enumerate(zip(record.weights, found.weights)):
        assert one.keys() == other.keys()
        assert max(float((one[name] - other[name]).abs().max()) for name in one) < BOUND, step
    num_compared = 0
    # TRL logs means over a window, over a round and over all completions; ours are those of a micro-batch.
    for step, (values, logs) in enumerate(zip(record.logged, found.logged) if is_logged else ()):
        last = [ids[-1] for _, group in record.rounds[step // (groups if one_by_one else 1)][1] for ids in group]
        if "mask_truncated" in ours and tokenizer.eos_token_id not in last:
            # TRL logs 0 for means over no token.
            continue
        shared = [name for name in names if name in values and names[name] in logs]
        shared = [name for name in shared if groups == 1 or not one_by_one or name not in OF_ROUNDS]
        shared = [name for name in shared if groups == 1 or name != "train_reward_deviation"]
        # TRL does not count what dual_clip clips.
        shared = [name for name in shared if name != "train_clip_share" or "dual_clip" not in ours]
        assert len(shared) >= (8 if groups == 1 else 2 + ("train_clip_share" in shared))
        # A sampled padding token ends no text; TRL takes it for an end.
        num_padded = 0 if "mask_truncated" in ours else last.count(tokenizer.pad_token_id)
        padded = {"train_truncated_share": num_padded / len(last)}
        for name in shared:
            # TRL rounds the loss to 6 digits.
            assert values[name] == pytest.approx(logs[names[name]] + padded.get(name, 0), rel=1e-4, abs=2e-6), name
        num_compared += 1
    assert num_compared >= (0 if not is_logged else 3 if "mask_truncated" in ours else STEPS)
    first, last = record.weights[0], record.weights[-1]
    assert max(float((last[name] - first[name]).abs().max()) for name in first) > 1e4 * BOUND
    return record
