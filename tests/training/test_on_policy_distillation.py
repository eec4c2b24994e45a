"""Distillation on the student's own completions: RolloutDataModule with a DistillationTuner (GKD)."""

import copy
from itertools import pairwise
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_fastft.callbacks.gradient_health import GradientHealth
from lightning_fastft.cli.lightning_cli import FastFTCLI
from lightning_fastft.core.async_reader import AsyncScalarReader
from lightning_fastft.core.errors import DataError, OptionError
from lightning_fastft.packing.rows.formats import FormatOptions
from lightning_fastft.packing.tokens.formatter import Formatter
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.data.rollouts import make_rollout
from lightning_fastft.training.distillation import DistillationTuner
from lightning_fastft.training.fine_tuner import FineTuner
from lightning_fastft.training.policy import PolicyTuner
from lightning_fastft.training.rollouts import RolloutDataModule
from lightning_fastft.training.samplers import FunctionSampler, Sampled
from tests.support.host_waits import CountSteps
from tests.support.packs import assert_close, separate
from tests.support.training_parts import SaveAtStep, quiet_trainer
from tests.support.tuners import make_tuner, step
from tests.training.test_distillation import divergence_alone, make_teacher, record
from tests.training.test_rollouts import CONFIG, SUMS, TEMPLATE, character_tokenizer

ROWS = [{"prompt": row["prompt"], "completion": row["answer"]} for row in SUMS]


def make_small_teacher():
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    return model


def answer(prompt):
    """Token ids that tell the prompts of SUMS apart; from one to three of them."""
    return [2 + (3 * prompt[0] + prompt[2]) % 10, 2 + prompt[2] % 7, 1][: 1 + prompt[0] % 3]


def make_parts(*, rows=ROWS, tuner_options=None, tuner_class=DistillationTuner, **options):
    torch.manual_seed(0)
    values = {"teacher": make_small_teacher(), "kind": "reverse_kl"} if tuner_class is DistillationTuner else {}
    tuner = tuner_class(
        copy.deepcopy(CONFIG), init="random", dtype="float32", tokenizer=character_tokenizer(), learning_rate=3e-3,
        scheduler="constant", warmup_steps=0, **{**values, **(tuner_options or {})},
    )  # fmt: skip
    values = {"num_completions": 2, "prompts_per_round": 8, "max_new_tokens": 3, "max_tokens": 64}
    return tuner, RolloutDataModule(rows, **{**values, **options})


def fit(folder, tuner, data, *, max_steps, ckpt_path=None, **options):
    trainer = quiet_trainer(folder, max_steps=max_steps, strategy=FastFTStrategy(), **options)
    trainer.fit(tuner, data, ckpt_path=ckpt_path)
    return trainer


def watch(tuner, read):
    """Keep what a function reads from each training batch before its step, and the loss of the step."""
    own_step, found = tuner.training_step, []

    def training_step(batch, batch_idx):
        seen = read(batch)
        found.append((seen, own_step(batch, batch_idx)))
        return found[-1][1]

    tuner.training_step = training_step
    return found


def spell(batch):
    """The prompt and the completion of each completion of a batch, as token ids."""
    parts = batch.context.start_host_S1.tolist()
    ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    documents = [(ids[begin:end], labels[begin:end]) for begin, end in pairwise(parts)]
    found, prompt = [], []
    for document, targets in documents:
        trained = [token for token in targets if token != -100]
        if not trained:
            prompt = document
        else:
            num_context = len(document) - len(trained)
            found.append((tuple(prompt + document[:num_context]), tuple(trained)))
    return found


# The loss.

GROUPS = [
    ([5, 6, 7], [[8, 9, 1], [10], [11, 12]]),
    ([4], [[20, 21], [22, 23, 24, 25]]),
    ([30, 31, 32, 33, 34, 35], [[40, 41]]),
]


@pytest.mark.covering
@pytest.mark.parametrize(
    "options",
    [{"kind": "reverse_kl"}, {"kind": "jsd", "beta": 0.1}, {"kind": "forward_kl"}, {"kind": "jsd", "temperature": 2.0}],
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.parametrize("shares_prompts", [True, False])
def test_completions_diverge_as_each_alone_behind_its_prompt(options, shares_prompts):
    teacher = make_teacher().double()
    tuner = make_tuner(DistillationTuner, teacher=teacher, lora=None, **options)
    tuner.model.double()
    documents = [make_rollout(prompt, [Sampled(ids) for ids in group], [0.0] * len(group)) for prompt, group in GROUPS]
    loss, ours, batch = step(tuner, documents, num_items=14, shares_prompts=shares_prompts)
    assert batch.context.num_labelled == 14
    assert batch.context.has_prefixes == shares_prompts
    truth = divergence_alone(tuner, teacher, separate(documents))
    truth.backward()
    assert_close(loss.double(), truth.detach(), bound=1e-6)
    theirs = {name: parameter.grad for name, parameter in tuner.named_parameters() if parameter.grad is not None}
    assert_close(ours, theirs, bound=1e-6)


def test_a_round_compares_each_prompts_own_completions(tmp_path):
    """From rows and the user's function to the loss, against a plain computation of one completion at a time."""
    asked = []

    def generate(prompts):
        asked.append(prompts)
        return [answer(prompt) for prompt in prompts]

    tuner, data = make_parts(sampler=FunctionSampler(generate), max_tokens=4096)
    teacher, losses = tuner._teacher[0], []

    def read(batch):
        documents = [make_rollout(prompt, [Sampled(answer(prompt))], [0.0]) for prompt in asked[-1]]
        losses.append(divergence_alone(tuner, teacher, separate(documents)).detach())
        return spell(batch)

    found = watch(tuner, read)
    fit(tmp_path, tuner, data, max_steps=3)
    assert len(asked) == len(found) == 3
    for prompts, (pairs, loss), truth in zip(asked, found, losses):
        assert len(prompts) == 16
        assert sorted(pairs) == sorted((tuple(prompt), tuple(answer(prompt))) for prompt in prompts)
        assert float(loss.detach()) == pytest.approx(float(truth), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["reverse_kl", pytest.param("jsd", marks=pytest.mark.fault)])
def test_a_student_nears_its_teacher_on_its_own_completions(tmp_path, kind):
    tuner, data = make_parts(num_completions=4, max_new_tokens=6, max_tokens=256, tuner_options={"kind": kind})
    record(tuner)
    fit(tmp_path, tuner, data, max_steps=50)
    assert sum(tuner.divergences[-10:]) < 0.5 * sum(tuner.divergences[:10])


def test_steps_without_rewards_are_judged_and_logged(tmp_path):
    tuner, data = make_parts()
    health, logged = GradientHealth(num_steps=3), {}
    own_log = tuner.log
    tuner.log = lambda name, value, **options: (logged.update({name: value}), own_log(name, value, **options))
    found = watch(tuner, lambda batch: batch.context.completions.old_log_prob_R)
    fit(tmp_path, tuner, data, max_steps=6, callbacks=[health])
    assert "moved" in health.status().reason
    assert logged.keys() <= tuner.logged_names
    # No importance ratio: nothing is computed ahead of a round of several steps.
    assert [seen for seen, _ in found] == [None] * 6


def test_a_step_waits_for_nothing(tmp_path):
    tuner, data = make_parts(sampled_share=0.5)
    # The plain twin of FusedAdamW, for a CPU, reads counts.
    tuner.optimizer_factory = lambda groups: torch.optim.AdamW(groups, fused=True)
    counter = CountSteps()
    with mock.patch.object(AsyncScalarReader, "poll", return_value=[]):
        fit(tmp_path, tuner, data, max_steps=3, callbacks=[GradientHealth(), counter])
    assert [waits.total for waits in counter.waits] == [0, 0, 0]


def test_a_round_of_fewer_packs_than_a_window_is_whole(tmp_path):
    tuner, data = make_parts(prompts_per_round=1)
    found = watch(tuner, lambda batch: batch.context.num_labelled)
    fit(tmp_path, tuner, data, max_steps=2, accumulate_grad_batches=3)
    assert len(found) == 6
    assert sorted(count > 0 for count, _ in found[:3]) == [False, False, True]


# Completions of the rows.


def given_pairs():
    """Each row of ROWS as the formatter of PackedDataModule has it."""
    formatter = Formatter(character_tokenizer(), options=FormatOptions(max_tokens=64))
    found = formatter.encode(ROWS, format="prompt_completion")
    return {
        (tuple(one.input_ids[~one.is_trained].tolist()), tuple(one.input_ids[one.is_trained].tolist())) for one in found
    }


def never(prompts):
    pytest.fail("sampled")


def test_a_share_of_0_trains_the_completions_of_the_rows(tmp_path):
    tuner, data = make_parts(sampler=FunctionSampler(never), sampled_share=0.0)
    found = watch(tuner, spell)
    fit(tmp_path, tuner, data, max_steps=6)
    seen = [pair for pairs, _ in found for pair in pairs]
    assert set(seen) == given_pairs()


def test_completions_of_rows_have_the_tools_and_template_options_of_their_row(tmp_path):
    ask, say = {"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}
    row = {"tools": [{"name": "7+"}], "chat_template_kwargs": {"base": "9+"}}
    rows = [{"prompt": [ask], "completion": [say], **row}] * 8
    tuner, data = make_parts(rows=rows, sampler=FunctionSampler(never), sampled_share=0.0)
    tuner.tokenizer.chat_template = TEMPLATE
    found = watch(tuner, spell)
    fit(tmp_path, tuner, data, max_steps=1)
    prompts = {tuner.tokenizer.decode(prompt).replace(" ", "") for prompt, _ in found[0][0]}
    assert prompts == {"7+9+1"}


def test_a_share_of_1_needs_no_completion_and_reads_none(tmp_path):
    tuner, data = make_parts(sampler=FunctionSampler(lambda prompts: [[13]] * len(prompts)))
    found = watch(tuner, spell)
    fit(tmp_path, tuner, data, max_steps=4)
    assert {completion for pairs, _ in found for _, completion in pairs} == {(13,)}


def test_a_share_between_samples_other_prompts_in_each_round(tmp_path):
    def run(folder, *, seed):
        sampler = FunctionSampler(lambda prompts: [[13]] * len(prompts))
        tuner, data = make_parts(
            sampler=sampler, sampled_share=0.25, num_completions=1, prompts_per_round=16, max_tokens=4096, seed=seed
        )
        found = watch(tuner, spell)
        fit(tmp_path / folder, tuner, data, max_steps=10)
        return [pairs for pairs, _ in found]

    rounds = run("a", seed=0)
    sampled = [sorted(prompt for prompt, completion in pairs if completion == (13,)) for pairs in rounds]
    given = [pair for pairs in rounds for pair in pairs if pair[1] != (13,)]
    # A round of all rows has each prompt once, whichever completion it got.
    prompts = sorted(tuple(character_tokenizer()(row["prompt"])["input_ids"]) for row in ROWS)
    assert all(sorted(prompt for prompt, _ in pairs) == prompts for pairs in rounds)
    assert len({tuple(prompts) for prompts in sampled}) > 5
    # 40 of 160 are expected, with a deviation of 5.5.
    assert 20 < sum(map(len, sampled)) < 60
    assert set(given) <= given_pairs()
    assert run("b", seed=0) == rounds
    assert run("c", seed=1) != rounds


@pytest.mark.covering
@pytest.mark.parametrize("sampled_share", [0.5, 1.0])
@pytest.mark.parametrize(("accumulate", "at"), [(1, 2), (2, 2)])
def test_a_run_goes_on_inside_a_round_from_its_checkpoint(tmp_path, sampled_share, accumulate, at):
    def run(folder, *, callbacks=(), ckpt_path=None):
        tuner, data = make_parts(sampled_share=sampled_share, max_tokens=16)
        batches = watch(tuner, spell)
        fit(
            tmp_path / folder, tuner, data, max_steps=7, callbacks=list(callbacks), ckpt_path=ckpt_path,
            accumulate_grad_batches=accumulate,
        )  # fmt: skip
        return tuner, [pairs for pairs, _ in batches]

    whole, batches = run("a", callbacks=[SaveAtStep(at, tmp_path / "saved.ckpt")])
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)["RolloutDataModule"]
    assert saved["in_round"] > 0
    resumed, later = run("b", ckpt_path=str(tmp_path / "saved.ckpt"))
    assert later == batches[at * accumulate :]
    for (name, one), (_, other) in zip(whole.named_parameters(), resumed.named_parameters()):
        assert torch.equal(one, other), name


# Refusals.


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tuner_options": {"store": "x", "kind": "forward_kl"}}, OptionError, "Leave store out"),
        ({"rewards": lambda **_: [0.0]}, OptionError, "remove rewards"),
        ({"rewards": lambda **_: [0.0], "sampled_share": 0.5}, OptionError, "sampled_share"),
        ({"sampled_share": 1.5}, OptionError, "sampled_share"),
        ({"tuner_class": PolicyTuner}, OptionError, "rewards"),
        ({"tuner_class": FineTuner}, OptionError, "FineTuner"),
        ({"rows": [*ROWS[:8], {"prompt": "1+1="}], "sampled_share": 0.5}, DataError, "row 9.*no completion"),
        ({"rows": [*ROWS[:8], {"prompt": "1=", "completion": []}], "sampled_share": 0.5}, DataError, "row 9.*a text"),
        ({"rows": [*ROWS[:8], {"prompt": "1+1=", "completion": "1" * 61}], "sampled_share": 0.5}, DataError, "row 9"),
        ({"sampler": FunctionSampler(lambda prompts: [[5]])}, DataError, "1 completions for 16 prompts"),
        ({"sampler": lambda tuner, prompts, **_: [[Sampled([5])] * 2]}, DataError, "for 8 prompts"),
        ({"sampler": lambda tuner, prompts, **_: [[Sampled([5])]] * 8}, DataError, "num_completions=2"),
        ({"sampler": FunctionSampler(lambda prompts: [[5] * 4] * 16)}, DataError, "max_new_tokens is 3"),
        ({"sampler": FunctionSampler(lambda prompts: [[14]] * 16)}, DataError, "14 rows"),
        ({"sampler": FunctionSampler(lambda prompts: [[]] * 16)}, DataError, "without a token"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        fit(tmp_path, *make_parts(**options), max_steps=1)


def test_a_sampler_of_no_function_is_refused():
    with pytest.raises(OptionError, match="generate"):
        FunctionSampler("generate")


# The command line.


def test_a_config_samples_for_a_student(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_samplers.py").write_text("def generate(prompts):\n    return [[3] for _ in prompts]\n")
    (tmp_path / "gkd.yaml").write_text(
        "data:\n"
        "  class_path: lightning_fastft.RolloutDataModule\n"
        "  init_args:\n"
        "    prompts: rows.jsonl\n"
        "    num_completions: 1\n"
        "    sampled_share: 0.5\n"
        "    sampler:\n"
        "      class_path: lightning_fastft.training.samplers.FunctionSampler\n"
        "      init_args:\n"
        "        generate: my_samplers.generate\n"
        "model:\n"
        "  class_path: lightning_fastft.DistillationTuner\n"
        "  init_args:\n"
        "    model: {model_type: qwen3, vocab_size: 64}\n"
        "    init: random\n"
        "    teacher: teacher\n"
        "    kind: reverse_kl\n"
        "trainer:\n"
        "  strategy: fastft\n"
        "  max_steps: 4\n"
    )
    words = ["--config", str(tmp_path / "gkd.yaml"), "--data.sampled_share", "0.75", "--allow-import", "my_samplers"]
    cli = FastFTCLI([*words, "--trainer.accelerator", "cpu", "--trainer.logger", "false"], run=False)
    assert type(cli.model) is DistillationTuner
    assert (cli.datamodule.rewards, cli.datamodule.sampled_share, cli.datamodule.num_completions) == ([], 0.75, 1)
    groups = cli.datamodule.sampler(None, [[5]], num_completions=2, max_new_tokens=1, temperature=1.0, seed=0)
    assert groups == [[Sampled([3]), Sampled([3])]]
