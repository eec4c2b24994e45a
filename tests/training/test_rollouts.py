"""RolloutDataModule: rounds of sampled, judged and packed rollouts; a small policy learns from them."""

import random
import sys

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.plugins import Precision
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from lightning_fastft.checkpoint.lightning_internals import logged_step_values
from lightning_fastft.core.errors import DataError, MissingDependencyError, OptionError, ResumeError
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.data import rounds
from lightning_fastft.training.data.rollouts import make_rollout
from lightning_fastft.training.data.sampled import judge
from lightning_fastft.training.policy import PolicyTuner
from lightning_fastft.training.rollouts import RolloutDataModule
from lightning_fastft.training.samplers import Sampled, VllmSampler
from tests.support.sizes import tiny_qwen3
from tests.support.training_parts import SaveAtStep, quiet_trainer

CHARACTERS = "0123456789+="
CONFIG = tiny_qwen3(vocab=len(CHARACTERS) + 2, inner=64, head_width=8, positions=64, tie_word_embeddings=False)
SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]


def character_tokenizer(characters=CHARACTERS):
    vocabulary = {character: number for number, character in enumerate(["<pad>", "<eos>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def is_right(*, prompts, completions, answer):
    return [float(completion == right) for completion, right in zip(completions, answer)]


def make_parts(*, config=CONFIG, learning_rate=3e-3, tuner_options=None, **options):
    tuner = PolicyTuner(
        config, dtype="float32", learning_rate=learning_rate, scheduler="constant", warmup_steps=0,
        **{"init": "random", "tokenizer": character_tokenizer(), **(tuner_options or {})},
    )  # fmt: skip
    values = {
        "rewards": is_right, "num_completions": 8, "prompts_per_round": 8, "max_new_tokens": 1, "max_tokens": 512,
    }  # fmt: skip
    return tuner, RolloutDataModule(SUMS, **{**values, **options})


def train(tmp_path, tuner, data, *, max_steps, **options):
    trainer = quiet_trainer(tmp_path, max_steps=max_steps, strategy=FastFTStrategy(), **options)
    trainer.fit(tuner, data)
    return trainer


@pytest.mark.slow
def test_the_reward_of_an_arithmetic_task_rises(tmp_path):
    # At 3e-3 a third of the seeds forget what they have learned, and the processor's rounding decides which.
    tuner, data = make_parts(learning_rate=1e-3)
    rewards = []
    own_step = tuner.training_step

    def step(batch, batch_idx):
        rewards.append(float(batch.context.completions.score_C.mean()))
        return own_step(batch, batch_idx)

    tuner.training_step = step
    train(tmp_path, tuner, data, max_steps=200)
    assert np.mean(rewards[:10]) < 0.25
    assert np.mean(rewards[-10:]) > 0.6


def test_a_round_asks_once_for_each_prompt_and_yields_whole_windows(tmp_path, monkeypatch):
    copy_to_host, callers = torch.Tensor.cpu, set()

    def note(tensor):
        callers.add(sys._getframe(1).f_globals["__name__"])
        return copy_to_host(tensor)

    # On a CPU no recorder of host syncs sees such a copy.
    monkeypatch.setattr(torch.Tensor, "cpu", note)
    asked, seen = [], []

    def sampler(tuner, prompts, *, num_completions, max_new_tokens, temperature, seed):
        asked.append((prompts, num_completions, max_new_tokens, temperature, seed))
        return [[Sampled([2 + number % 10, 1]) for number in range(num_completions)] for _ in prompts]

    tuner, data = make_parts(sampler=sampler, max_tokens=48, max_new_tokens=2)
    own_step = tuner.training_step

    def step(batch, batch_idx):
        seen.append(batch)
        return own_step(batch, batch_idx)

    tuner.training_step = step
    train(tmp_path, tuner, data, max_steps=8, accumulate_grad_batches=2)
    # A round has 8 rollouts of 3 + 8 * 3 tokens: one in each pack of 48, so 8 packs and 4 steps.
    assert len(asked) == 2
    assert [len(prompts) for prompts, *_ in asked] == [8, 8]
    assert asked[0][1:4] == (8, 2, 1.0)
    assert asked[0][4] != asked[1][4]
    assert {tuple(prompt) for prompts, *_ in asked for prompt in prompts} == {
        tuple(character_tokenizer()(row["prompt"])["input_ids"]) for row in SUMS
    }
    assert len(seen) == 16
    assert all(batch.context.has_prefixes for batch in seen)
    assert all(batch.context.num_items == 8 for batch in seen)
    # Several steps from one round: the log-probabilities before the first are known.
    assert all(batch.context.completions.old_log_prob_R is not None for batch in seen)
    assert not any(name.startswith("lightning_fastft.") for name in callers)


# A round has 8 micro-batches. Of two in a window, the last save of SaveAt is behind the first of the next window.
@pytest.mark.parametrize(("accumulate", "step"), [(1, 5), (1, 8), (2, 5), (2, 4), (2, 8)])
def test_a_run_goes_on_inside_a_round_from_its_checkpoint(tmp_path, accumulate, step):
    def run(folder, *, saves=False, ckpt_path=None):
        torch.manual_seed(0)
        tuner, data = make_parts(max_tokens=48, max_new_tokens=2)
        callbacks = [SaveAtStep(step, tmp_path / "saved.ckpt")] if saves else []
        trainer = quiet_trainer(
            folder, max_steps=11, strategy=FastFTStrategy(), callbacks=callbacks, accumulate_grad_batches=accumulate
        )
        trainer.fit(tuner, data, ckpt_path=ckpt_path)
        return tuner

    whole = run(tmp_path / "a", saves=True)
    resumed = run(tmp_path / "b", ckpt_path=str(tmp_path / "saved.ckpt"))
    for (name, one), (_, other) in zip(whole.named_parameters(), resumed.named_parameters()):
        assert torch.equal(one, other), name


@pytest.mark.filterwarnings("ignore:Resumed with another setting")
@pytest.mark.parametrize("step", [3, 8])
def test_a_resumed_run_repeats_the_random_numbers_of_rewards_and_dropout(tmp_path, step):
    """Step 8 is the end of a round: the next one is sampled before the first batch, where random states are restored."""

    def noisy(*, completions, **columns):
        return [random.random() + float(np.random.rand()) + float(torch.rand(())) for _ in completions]

    def run(folder, *, seed, saves=False, ckpt_path=None):
        seed_everything(seed, verbose=False)
        tuner, data = make_parts(
            config=str(tmp_path / "base"), max_tokens=48, max_new_tokens=2, rewards=noisy,
            tuner_options={"init": "pretrained", "lora": {"r": 4, "lora_dropout": 0.2}},
        )  # fmt: skip
        callbacks = [SaveAtStep(step, tmp_path / "saved.ckpt")] if saves else []
        trainer = quiet_trainer(folder, max_steps=11, strategy=FastFTStrategy(), callbacks=callbacks)
        trainer.fit(tuner, data, ckpt_path=ckpt_path)
        return tuner

    AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG)).save_pretrained(tmp_path / "base")
    whole = run(tmp_path / "a", seed=0, saves=True)
    resumed = run(tmp_path / "b", seed=1, ckpt_path=str(tmp_path / "saved.ckpt"))
    for (name, one), (_, other) in zip(whole.named_parameters(), resumed.named_parameters()):
        assert torch.equal(one, other), name


def test_a_failed_step_is_trained_again(tmp_path):
    class FailedStepError(Exception):
        pass

    def run(folder, *, fails_at=None, ckpt_path=None):
        torch.manual_seed(0)
        tuner, data = make_parts(max_tokens=48, max_new_tokens=2)
        own_step = tuner.training_step

        def step(batch, batch_idx):
            if batch_idx == fails_at:
                trainer.save_checkpoint(tmp_path / "saved.ckpt")
                raise FailedStepError
            return own_step(batch, batch_idx)

        tuner.training_step = step
        trainer = quiet_trainer(folder, max_steps=11, strategy=FastFTStrategy())
        trainer.fit(tuner, data, ckpt_path=ckpt_path)
        return tuner

    whole = run(tmp_path / "a")
    with pytest.raises(FailedStepError):
        run(tmp_path / "b", fails_at=5)
    resumed = run(tmp_path / "c", ckpt_path=str(tmp_path / "saved.ckpt"))
    for (name, one), (_, other) in zip(whole.named_parameters(), resumed.named_parameters()):
        assert torch.equal(one, other), name


def test_other_sizes_are_refused_inside_a_round_alone(tmp_path):
    def run(folder, *, accumulate, **options):
        tuner, data = make_parts(max_tokens=48, max_new_tokens=2)
        trainer = quiet_trainer(
            tmp_path / folder, max_steps=9, strategy=FastFTStrategy(), accumulate_grad_batches=accumulate,
            callbacks=options.pop("callbacks", []),
        )  # fmt: skip
        trainer.fit(tuner, data, **options)

    inside, behind = tmp_path / "5.ckpt", tmp_path / "8.ckpt"
    run("a", accumulate=1, callbacks=[SaveAtStep(5, inside), SaveAtStep(8, behind)])
    with pytest.raises(ResumeError, match="accumulate_grad_batches was 1 and is 2"):
        run("b", accumulate=2, ckpt_path=str(inside))
    with pytest.warns(UserWarning, match="accumulate_grad_batches was 1 and is 2"):
        run("c", accumulate=2, ckpt_path=str(behind))


@pytest.mark.parametrize(
    ("more", "shares"),
    [({}, True), ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, False)],
)
def test_a_prompt_is_repeated_where_the_model_cannot_share_it(tmp_path, more, shares):
    tuner, data = make_parts(config={**CONFIG, **more}, num_completions=2, prompts_per_round=2)
    seen = []
    own_step = tuner.training_step

    def step(batch, batch_idx):
        seen.append(batch.context.has_prefixes)
        return own_step(batch, batch_idx)

    tuner.training_step = step
    train(tmp_path, tuner, data, max_steps=1)
    assert seen == [shares]


@pytest.mark.parametrize("max_tokens", [512, 24])
def test_without_a_correction_the_sampler_is_taken_for_the_policy(tmp_path, max_tokens):
    """However many steps the packs of a round are."""

    def sampler(log_probs):
        return lambda tuner, prompts, *, num_completions, **_: [
            [Sampled([2 + number], log_probs) for number in range(num_completions)] for _ in prompts
        ]

    found = []
    for log_probs in (None, [-9.0]):
        torch.manual_seed(0)
        tuner, data = make_parts(
            sampler=sampler(log_probs), max_tokens=max_tokens, num_completions=4, prompts_per_round=4
        )
        train(tmp_path, tuner, data, max_steps=2)
        found.append(torch.cat([parameter.detach().flatten() for parameter in tuner.parameters()]))
    assert torch.equal(*found)


def test_log_probabilities_before_the_first_step_are_in_the_precision_of_the_step(tmp_path):
    class Autocast(Precision):
        def forward_context(self):
            return torch.autocast("cpu", torch.bfloat16)

    tuner, data = make_parts(max_tokens=48, max_new_tokens=2, learning_rate=0.0)
    own_step, same = tuner.training_step, []

    def step(batch, batch_idx):
        same.append(torch.equal(tuner._read_log_probs(batch), batch.context.completions.old_log_prob_R))
        with torch.autocast("cpu", enabled=False):
            wide_R = PolicyTuner._read(tuner, batch, lambda logits: logits.log_probs().log_prob_R)
        same.append(not torch.equal(wide_R, batch.context.completions.old_log_prob_R))
        return own_step(batch, batch_idx)

    tuner.training_step = step
    train(tmp_path, tuner, data, max_steps=2, plugins=[Autocast()])
    assert same == [True] * 4


def test_log_probabilities_before_the_first_step_are_without_dropout(tmp_path):
    """As the completions were sampled: else a ratio compares two draws of dropout."""
    tuner, data = make_parts(max_tokens=48, max_new_tokens=2, tuner_options={"lora": {"r": 4, "lora_dropout": 0.9}})
    own_step, distances = tuner.training_step, []

    def step(batch, batch_idx):
        assert all(module.training for module in tuner.model.modules())
        tuner.model.eval()
        old_R = batch.context.completions.old_log_prob_R
        distances.append(float((tuner._read_log_probs(batch) - old_R).abs().max()))
        tuner.model.train()
        return own_step(batch, batch_idx)

    tuner.training_step = step
    with torch.random.fork_rng():
        tuner.configure_model()
        for name, parameter in tuner.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
    train(tmp_path, tuner, data, max_steps=1)
    assert distances == [0.0]


# Two packs fill half of a window of 4.
def test_packs_without_rollouts_are_not_in_what_is_logged(tmp_path):
    class Note(Callback):
        def on_train_batch_end(self, trainer, *args):
            values.append({name: float(value) for name, value in logged_step_values(trainer).items()})

    values = []
    tuner, data = make_parts(
        rewards=lambda completions, **_: [2.0] * len(completions), prompts_per_round=2, max_tokens=24, max_new_tokens=1
    )
    trainer = train(tmp_path, tuner, data, max_steps=2, accumulate_grad_batches=4, callbacks=[Note()])
    assert [found.get("train_reward") for found in values] == [None, None, 2.0, 2.0] * 2
    assert [found.get("train_length") for found in values] == [None, None, 1.0, 1.0] * 2
    assert all(found.keys() == values[2].keys() for found in values if found)
    assert float(trainer.logged_metrics["train_reward"]) == 2.0


def test_a_rollout_holds_prompt_completions_and_scores():
    document = make_rollout([5, 6], [Sampled([7], [-0.5]), Sampled([8, 1], [-0.25, -1.0])], [1.0, 0.0])
    assert document.input_ids.tolist() == [5, 6, 7, 8, 1]
    assert document.labels.tolist() == [-100, -100, 7, 8, 1]
    assert document.segment_lengths == (2, 1, 2)
    assert document.log_probs.tolist() == [0.0, 0.0, -0.5, -0.25, -1.0]
    assert make_rollout([5], [Sampled([7], [-0.5]), Sampled([8])], [1.0, 0.0]).log_probs is None
    with pytest.raises(DataError, match="without a token"):
        make_rollout([5], [Sampled([])], [0.0])
    with pytest.raises(DataError, match="log-probabilities"):
        make_rollout([5], [Sampled([7], [])], [0.0])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rewards": lambda **_: [0.0]}, DataError, "one finite number"),
        ({"rewards": lambda completions, **_: [float("nan")] * len(completions)}, DataError, "finite"),
        ({"rewards": lambda completions, **_: [torch.ones(2)] * len(completions)}, DataError, "one finite number"),
        ({"rewards": []}, OptionError, "rewards"),
        ({"max_tokens": 8}, OptionError, "max_tokens"),
        # 8 copies of a prompt of 4 tokens, with a completion of one.
        ({"max_tokens": 39, "share_prompts": False}, OptionError, "max_tokens"),
        ({"prompts_per_round": 17}, OptionError, "prompts_per_round"),
        ({"temperature": 0.7}, OptionError, r"temperature=0\.7, and the PolicyTuner .* temperature=1\.0"),
        ({"num_completions": 1}, OptionError, "num_completions"),
        ({"rewards": lambda completions, **_: ["good"] * len(completions)}, DataError, "list of numbers"),
        ({"tuner_options": {"sampler_clip": 2.0}}, OptionError, "sample_with_model returned none"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        train(tmp_path, *make_parts(**options), max_steps=1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_epochs": 1}, r"never ends the run.*--trainer\.max_steps"),
        ({"max_epochs": -1}, r"never ends the run.*--trainer\.max_steps"),
        ({"max_steps": 2, "limit_train_batches": 0.5}, r"limit_train_batches=0\.5 is a share"),
        ({"max_epochs": 1, "limit_train_batches": 3, "accumulate_grad_batches": 2}, "cuts an accumulation window"),
        ({"fast_dev_run": 1, "accumulate_grad_batches": 2}, "fast_dev_run=1 cuts"),
        ({"max_steps": 2, "callbacks": [GradientAccumulationScheduler({1: 2})]}, "changes accumulate_grad_batches"),
    ],
)
def test_a_run_without_an_end_or_of_a_share_is_refused_before_it_samples(tmp_path, options, said):
    def sampler(*_, **__):
        raise AssertionError

    with pytest.raises(OptionError, match=said):
        train(tmp_path, *make_parts(sampler=sampler), **{"max_steps": -1, **options})


@pytest.mark.parametrize("options", [{"max_time": "00:00:00:01"}, {"max_epochs": 2, "limit_train_batches": 3}])
def test_a_run_ends_by_time_or_by_limited_epochs(tmp_path, options):
    trainer = train(tmp_path, *make_parts(), max_steps=-1, **options)
    assert trainer.global_step == 6 if "max_epochs" in options else trainer.global_step > 0


def test_an_epoch_that_a_hook_ends_inside_a_window_is_followed_by_whole_windows(tmp_path):
    def sampler(tuner, prompts, *, num_completions, **_):
        return [[Sampled([2] * (1 + (place + number) % 3)) for number in range(num_completions)] for place in
                range(len(prompts))]  # fmt: skip

    tuner, data = make_parts(sampler=sampler, max_tokens=48, max_new_tokens=3, tuner_options={"loss": "dapo"})
    own_step, seen = tuner.training_step, []

    def step(batch, batch_idx):
        seen.append((batch.context.num_items, batch.context.num_labelled))
        return own_step(batch, batch_idx)

    tuner.training_step = step
    tuner.on_train_batch_start = lambda batch, batch_idx: -1 if batch_idx == 2 else None
    train(tmp_path, tuner, data, max_steps=3, accumulate_grad_batches=2)
    assert all(
        items == other_items == (count + other_count) / 2
        for (items, count), (other_items, other_count) in zip(seen[::2], seen[1::2])
    )


def note_prompts(seen):
    """A sampler that keeps the prompts of each call as texts, and answers all alike."""

    def sampler(tuner, prompts, *, num_completions, **_):
        seen.append([tuner.tokenizer.decode(prompt).replace(" ", "") for prompt in prompts])
        return [[Sampled([2])] * num_completions for _ in prompts]

    return sampler


TEMPLATE = (
    "{% if tools %}{{ tools[0].name }}{% endif %}{{ base }}{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)


def test_tools_and_template_options_of_a_prompt_reach_the_template(tmp_path):
    tuner, _ = make_parts()
    tuner.tokenizer.chat_template, seen = TEMPLATE, []
    rows = [
        {
            "prompt": [{"role": "user", "content": "12"}],
            "tools": [{"name": "7+"}],
            "chat_template_kwargs": {"base": "9+"},
        }
    ]
    data = RolloutDataModule(
        rows, rewards=lambda completions, **_: range(len(completions)), sampler=note_prompts(seen), prompts_per_round=1
    )
    train(tmp_path, tuner, data, max_steps=1)
    assert seen == [["7+9+12="]]


def test_template_options_for_all_prompts_reach_the_template(tmp_path):
    tuner, _ = make_parts()
    tuner.tokenizer.chat_template, seen = TEMPLATE, []
    rows = [{"prompt": [{"role": "user", "content": "12"}]}]
    data = RolloutDataModule(
        rows, rewards=lambda completions, **_: range(len(completions)), sampler=note_prompts(seen), prompts_per_round=1,
        chat_template_kwargs={"base": "9+"},
    )  # fmt: skip
    train(tmp_path, tuner, data, max_steps=1)
    assert seen == [["9+12="]]
    assert tuner.chat_template_kwargs == {"base": "9+"}


def test_rewards_get_columns_that_the_first_row_of_a_round_lacks(tmp_path):
    seen = []

    def reward(*, completions, answer=(), hint=(), **_):
        seen.append((set(answer), set(hint)))
        return [0.0] * len(completions)

    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "hint": "3"}]
    data = RolloutDataModule(rows, rewards=reward, num_completions=2, prompts_per_round=1, max_new_tokens=1)
    train(tmp_path, make_parts()[0], data, max_steps=2)
    assert sorted(seen, key=str) == [({"2"}, {None}), ({None}, {"3"})]


def test_a_reward_that_takes_completion_ids_gets_the_sampled_tokens(tmp_path):
    """As TRL's get_soft_overlong_punishment, which DAPO adds."""
    sampled, seen = [[2, 1], [3, 4]], []

    def long(completion_ids, **columns):
        assert sorted(columns) == ["answer", "completions", "prompts"]
        seen.append(completion_ids)
        return [-float(len(ids)) for ids in completion_ids]

    def any_column(**columns):
        seen.append(columns["completion_ids"])
        return [0.0] * len(columns["completions"])

    def plain(*, prompts, completions, answer):
        return [0.0] * len(completions)

    def sampler(tuner, prompts, **_):
        return [[Sampled(ids) for ids in sampled] for _ in prompts]

    tuner, data = make_parts(
        rewards=[long, any_column, plain], sampler=sampler, num_completions=2, prompts_per_round=2, max_new_tokens=2
    )
    train(tmp_path, tuner, data, max_steps=1)
    assert seen == [sampled * 2] * 2


@pytest.mark.parametrize("name", ["prompts", "completions", "completion_ids"])
def test_a_column_of_a_name_that_rewards_get_is_refused(tmp_path, name):
    data = RolloutDataModule([{"prompt": "1+1=", name: "2"}], rewards=is_right, num_completions=2, prompts_per_round=1)
    with pytest.raises(DataError, match=f"column '{name}'"):
        train(tmp_path, make_parts()[0], data, max_steps=1)


@pytest.mark.parametrize("make", [lambda values: values, list], ids=["tensor", "list of tensors"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rewards_of_a_model_are_numbers(make, dtype):
    """A reward model returns tensors, in its dtype and with a graph where nothing switched it off."""
    scores = torch.tensor([0.5, -2.0], dtype=dtype, requires_grad=True)
    found = judge(
        [{"prompt": "1+1="}],
        [[Sampled([3]), Sampled([4])]],
        rewards=[lambda **_: make(scores * 2), lambda **_: [1, 0]],
        columns=[],
        tokenizer=character_tokenizer(),
    )
    assert found == [[2.0, -4.0]]


@pytest.mark.parametrize(
    ("values", "named", "other"),
    [
        ([1.0], r"shape \(1,\) for 2 completions", "not finite"),
        ([1.0, float("nan")], "nan for the completion '2'", "shape"),
    ],
)
def test_an_error_of_a_reward_names_what_is_wrong(values, named, other):
    tokenizer = character_tokenizer()
    groups = [[Sampled(tokenizer.encode("1")), Sampled(tokenizer.encode("2"))]]
    with pytest.raises(DataError, match=named) as refused:
        judge([{"prompt": "1+1="}], groups, rewards=[lambda **_: values], columns=[], tokenizer=tokenizer)
    assert other not in str(refused.value)


def judge_texts(*rewards, texts=("1", "2"), weights=None):
    tokenizer = character_tokenizer()
    groups = [[Sampled(tokenizer.encode(text)) for text in texts]]
    return judge([{"prompt": "1+1="}], groups, rewards=rewards, weights=weights, columns=[], tokenizer=tokenizer)[0]


@pytest.mark.parametrize(
    "make",
    [
        list, tuple, lambda values: np.array(values, dtype=object),
        lambda values: [None if value is None else torch.tensor(value) for value in values],
    ],
    ids=["list", "tuple", "array", "tensors"],
)  # fmt: skip
def test_a_reward_counts_where_it_is_not_none(make):
    first, second = make([None, 2.0, None, 3.0]), make([1.0, 4.0, None, None])
    found = judge_texts(lambda **_: first, lambda **_: second, texts="1234", weights=[0.5, -2.0])
    assert found == [-2.0, -7.0, None, 1.5]


def test_a_reward_that_returns_nothing_is_named():
    with pytest.raises(DataError, match=r"shape \(\) for 2 completions"):
        judge_texts(lambda **_: None)


@pytest.mark.parametrize("weights", [[1.0], [1.0, 2.0, 3.0], 2.0, [1.0, float("nan")], [1.0, True], [1.0, None]])
def test_reward_weights_that_do_not_fit_are_refused(weights):
    with pytest.raises(OptionError, match="reward_weights"):
        make_parts(rewards=[is_right, is_right], reward_weights=weights)
    with pytest.raises(OptionError, match="reward_weights"):
        make_parts(rewards=None, num_completions=1, reward_weights=weights)


def test_completions_without_a_reward_are_not_trained(tmp_path):
    """A group keeps the others; a prompt without any is not in the round, and a round without any is an error."""
    seen = []

    def some(*, prompts, completions, answer):
        return [None if prompt[0] == "0" or n % 8 == 3 else float(n % 8) for n, prompt in enumerate(prompts)]

    tuner, data = make_parts(rewards=some)
    pack = data._pack

    def note(documents):
        seen.append(documents)
        return pack(documents)

    data._pack = note
    with pytest.warns(UserWarning, match="returned None for some completions"):
        train(tmp_path, tuner, data, max_steps=2)
    # Four of the sixteen prompts begin with 0.
    assert sum(map(len, seen)) == 12
    for document in seen[0] + seen[1]:
        assert document.scores == (0.0, 1.0, 2.0, 4.0, 5.0, 6.0, 7.0)
        assert len(document.segment_lengths) == 8
    tuner, data = make_parts(rewards=lambda completions, **_: [None] * len(completions))
    with (
        pytest.warns(UserWarning, match="returned None for some completions"),
        pytest.raises(DataError, match="nothing to train"),
    ):
        train(tmp_path, tuner, data, max_steps=1)


def test_a_rank_without_a_rollout_trains_as_many_packs_as_the_others(monkeypatch):
    monkeypatch.setattr(rounds, "on_all_ranks", lambda make, error: [make(), np.ones_like(make()) * 3])
    batches = rounds.pack_round(
        [], np.zeros(0, dtype=np.int64), max_tokens=64, pad_to_max=False, shares_prompts=True, accumulate=2, seed=0,
        device=torch.device("cpu"),
    )  # fmt: skip
    assert len(batches) == 4
    assert all(batch.context.completions.num_completions == 0 for batch in batches)


def test_a_second_run_samples_rounds_of_its_own(tmp_path):
    """Rollouts that are left of a round, and prompts by another tokenizer, are not those of the second run."""
    seen = []
    tuner, data = make_parts(sampler=note_prompts(seen), max_tokens=48)
    train(tmp_path, tuner, data, max_steps=3)
    other, _ = make_parts(tuner_options={"tokenizer": character_tokenizer(CHARACTERS[::-1])})
    train(tmp_path, other, data, max_steps=3)
    assert len(seen) == 2
    assert seen[0] == seen[1]


def test_a_row_without_a_prompt_is_named(tmp_path):
    tuner, _ = make_parts()
    data = RolloutDataModule([{"prompt": "1+1="}, {"text": "x"}], rewards=is_right, prompts_per_round=1)
    with pytest.raises(DataError, match=r"row 2: missing column.*'text'"):
        train(tmp_path, tuner, data, max_steps=1)


def test_vllm_that_is_missing_is_named():
    with pytest.raises(MissingDependencyError, match="pip install vllm"):
        VllmSampler("base")


@pytest.mark.filterwarnings("ignore:Resumed with another setting")
@pytest.mark.parametrize(
    ("step", "options", "said"),
    [
        (8, {"prompts": SUMS[1:]}, "prompts"),
        (8, {"seed": 1}, "seed"),
        (8, {"prompts_per_round": 4}, "prompts_per_round"),
        (5, {"max_tokens": 64}, "max_tokens was 48"),
        (5, {"share_prompts": False}, "share_prompts"),
    ],
)
def test_a_run_of_other_rounds_is_not_resumed(tmp_path, step, options, said):
    """A place in other rounds would skip some prompts and repeat others; in other packs also some rollouts."""

    def run(folder, *, callbacks=(), ckpt_path=None, prompts=SUMS, **options):
        tuner, _ = make_parts()
        data = RolloutDataModule(
            prompts,
            **{"rewards": is_right, "prompts_per_round": 8, "max_new_tokens": 2, "max_tokens": 48, **options},
        )
        trainer = quiet_trainer(tmp_path / folder, max_steps=9, strategy=FastFTStrategy(), callbacks=list(callbacks))
        trainer.fit(tuner, data, ckpt_path=ckpt_path)

    saved = tmp_path / "saved.ckpt"
    run("a", callbacks=[SaveAtStep(step, saved)])
    with pytest.raises(ResumeError, match=said):
        run("b", ckpt_path=str(saved), **options)


def test_a_resumed_run_says_that_it_samples_otherwise(tmp_path):
    def run(folder, *, callbacks=(), ckpt_path=None, **options):
        tuner, data = make_parts(max_tokens=48, max_new_tokens=2, **options)
        trainer = quiet_trainer(tmp_path / folder, max_steps=9, strategy=FastFTStrategy(), callbacks=list(callbacks))
        trainer.fit(tuner, data, ckpt_path=ckpt_path)

    saved = tmp_path / "saved.ckpt"
    run("a", callbacks=[SaveAtStep(8, saved)])
    with pytest.warns(UserWarning, match="num_completions was 8 and is 4"):
        run("b", ckpt_path=str(saved), num_completions=4)
    with pytest.warns(UserWarning, match=r"sampling_options was \{\} and is \{'top_p': 0.5\}"):
        run("c", ckpt_path=str(saved), sampling_options={"top_p": 0.5})
    with pytest.warns(UserWarning, match="mask_truncated was False and is True"):
        run("d", ckpt_path=str(saved), mask_truncated=True)
