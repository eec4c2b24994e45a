"""GenerateSamples: greedy answers at validations, which change nothing of the training."""

import copy
import json
import random

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from lightning_fastft import FusedKernels, GenerateSamples, RunReport
from lightning_fastft.core.errors import OptionError
from lightning_fastft.hf.generation import generate_texts
from lightning_fastft.monitor.generate_samples import MOST_VALIDATIONS, Samples
from tests.monitor.samples_worker import find_answers
from tests.support.fine_tuners import tuner, word_tokenizer
from tests.support.training_parts import PlainModule, packed_loader, quiet_trainer, tiny_llama
from tests.support.two_ranks import run_two_ranks

PROMPTS = ["w3 w4 w5", "w6"]
CONVERSATION = [{"role": "user", "content": "w7 w8"}]


class States(pl.Callback):
    """Random states, modes and losses at the start of each batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen.append(
            (
                torch.get_rng_state(),
                np.random.get_state()[1].copy(),
                random.getstate(),
                [module.training for module in pl_module.modules()],
            )
        )


def fit(tmp_path, samples, *, callbacks=()):
    pl.seed_everything(5)
    module = tuner("lora", lora={"r": 4, "lora_alpha": 8, "lora_dropout": 0.2}, tokenizer=None)
    states = States()
    trainer = quiet_trainer(
        tmp_path,
        strategy="fastft",
        max_steps=6,
        val_check_interval=2,
        callbacks=[FusedKernels(), states, *([samples] if samples else []), *callbacks],
    )
    trainer.fit(module, packed_loader(6), packed_loader(2, seed=40))
    return module, states.seen


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    samples = GenerateSamples(PROMPTS, max_new_tokens=5, tokenizer=word_tokenizer())
    report = RunReport(folder / "run.html", profile_step=None)
    return fit(folder, None), fit(folder, samples, callbacks=[report]), samples, report


def test_training_is_bit_equal_to_a_run_without_samples(runs):
    (plain, plain_states), (sampled, states), _, _ = runs
    assert len(plain_states) == len(states) == 6
    for (torch_one, numpy_one, python_one, modes_one), (torch_two, numpy_two, python_two, modes_two) in zip(
        plain_states, states
    ):
        assert torch.equal(torch_one, torch_two)
        assert (numpy_one == numpy_two).all()
        assert (python_one, modes_one) == (python_two, modes_two)
    one, two = plain.state_dict(), sampled.state_dict()
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_answers_are_those_of_the_weights_at_each_validation(runs):
    _, (module, _), samples, _ = runs
    assert [found.step for found in samples.samples] == [2, 4, 6]
    # The last validation had the weights that the run ended with, and the patches are undone now.
    answers = generate_texts(
        module.model, tokenizer=word_tokenizer(), prompts=PROMPTS, max_new_tokens=5, do_sample=False
    )
    assert samples.samples[-1].answers == answers
    assert len(set(answers)) == len(answers)
    assert samples.status().state == "active"


def test_answers_that_no_logger_takes_are_told(tmp_path, caplog):
    caplog.set_level("INFO")
    samples = GenerateSamples(PROMPTS, max_new_tokens=5, tokenizer=word_tokenizer())
    fit(tmp_path, samples)
    told = [record.message for record in caplog.records if record.message.startswith("sample at step")]
    assert told == [
        f"sample at step {found.step}: {prompt!r} -> {answer!r}"
        for found in samples.samples
        for prompt, answer in zip(PROMPTS, found.answers)
    ]


def test_report_has_prompts_and_answers(runs):
    _, _, samples, report = runs
    data, text = json.loads(report.json_path.read_text()), report.html_path.read_text()
    assert [prompt["prompt"] for prompt in data["samples"]["prompts"]] == PROMPTS
    for place, prompt in enumerate(data["samples"]["prompts"]):
        found = [(answer["step"], answer["text"]) for answer in prompt["answers"]]
        assert found == [(one.step, one.answers[place]) for one in reversed(samples.samples)]
        assert f'<pre class="answer" dir="auto">{found[0][1]}</pre>' in text
    assert text.count("<details><summary>Earlier") == len(PROMPTS)
    assert text.count("<details") == text.count("</details>")


def test_the_first_and_the_last_validations_are_kept():
    samples, trainer = GenerateSamples(["a"]), pl.Trainer(logger=False, enable_checkpointing=False)
    for step in range(20):
        samples._add(trainer, Samples(step, [str(step)]))
    assert [found.step for found in samples.samples] == [0, *range(20 - MOST_VALIDATIONS + 1, 20)]
    assert samples.describe()["num_left"] == 20 - MOST_VALIDATIONS


@pytest.mark.parametrize("prompt", ["", [{"content": "no role"}]])
def test_refuses_prompts_that_cannot_be(prompt):
    with pytest.raises(OptionError):
        GenerateSamples([prompt])


def test_refuses_a_run_without_tokenizer_or_model_before_training(tmp_path):
    trainer = quiet_trainer(tmp_path, strategy="fastft", callbacks=[GenerateSamples(["w3"])])
    with pytest.raises(OptionError, match="tokenizer"):
        trainer.fit(PlainModule(tiny_llama()), packed_loader(2))
    samples = GenerateSamples(["w3"], tokenizer=word_tokenizer())
    with pytest.raises(OptionError, match="found 0"):
        samples.on_fit_start(trainer, pl.LightningModule())


@pytest.mark.slow
def test_ranks_that_own_experts_write_what_one_process_writes(tmp_path):
    run_two_ranks("tests.monitor.samples_worker", tmp_path / "answers")
    truth, found = find_answers(num_ranks=1), [torch.load(tmp_path / f"answers.{rank}") for rank in range(2)]
    assert found[0] == truth
    # Rank 0 keeps the samples.
    assert found[1] == {**truth, "samples": []}


def test_conversations_are_shown_as_text():
    samples = GenerateSamples([CONVERSATION, [*CONVERSATION, {"role": "assistant", "content": "w9"}]])
    samples.samples = [Samples(1, ["x", "y"])]
    assert [prompt["prompt"] for prompt in samples.describe()["prompts"]] == ["w7 w8", "user: w7 w8\nassistant: w9"]
    assert copy.deepcopy(samples).describe() == samples.describe()
