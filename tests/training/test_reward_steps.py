"""RewardTuner with labelled steps: packed steps against each answer alone, and what stock transformers reads back."""

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from lightning_fastft.core.errors import DataError
from lightning_fastft.packing.collate import collate
from lightning_fastft.packing.document import Document
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.reward import RewardTuner
from tests.support.packs import assert_close
from tests.support.tiny_models import VOCABULARY
from tests.support.training_parts import quiet_data, quiet_trainer
from tests.support.tuners import CONFIG, gradients, make_tuner, packed, step
from tests.training.test_rollouts import character_tokenizer

# Tokens of the prompt, then of each step.
LENGTHS = ((6, 3, 1, 5), (1, 4), (11, 2, 2, 2, 3), (3, 7, 1))


def documents_of_steps(lengths=LENGTHS, *, labels=None):
    draws = np.random.default_rng(0)
    documents = []
    for example in lengths:
        ids = draws.integers(3, VOCABULARY, sum(example))
        trained = np.full(len(ids), -100)
        ends = np.cumsum(example)[1:] - 1
        trained[ends] = ids[ends]
        scores = labels or tuple(draws.choice([0.0, 0.25, 1.0], len(example) - 1).tolist())
        documents.append(Document(ids, trained, segment_lengths=example, scores=scores, is_stepwise=True))
    return documents


def scores_alone(tuner, documents):
    """The score of each step from a forward of its answer alone, by plain transformers."""
    model = tuner.model.get_base_model() if hasattr(tuner.model, "peft_config") else tuner.model
    found = []
    for document in documents:
        hidden = model.model(input_ids=torch.as_tensor(document.input_ids)[None], use_cache=False).last_hidden_state[0]
        found.append(model.score(hidden)[np.cumsum(document.segment_lengths)[1:] - 1, 0])
    return torch.cat(found)


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("shares_prompts", [True, False])
def test_packed_steps_are_scored_as_each_answer_alone(lora, shares_prompts):
    tuner, documents = (
        make_tuner(RewardTuner, loss="stepwise", **({} if lora else {"lora": None})),
        documents_of_steps(),
    )
    with torch.no_grad():
        tuner._find_head(tuner.model).bias.fill_(0.3)
    found, ours, batch = step(tuner, documents, shares_prompts=shares_prompts)
    # A step is a place in its answer, not a copy of it.
    assert batch.context.num_tokens == sum(map(sum, LENGTHS))
    labels = torch.tensor([score for document in documents for score in document.scores])
    scores = scores_alone(tuner, documents)
    truth = binary_cross_entropy_with_logits(scores, labels)
    truth.backward()
    theirs = gradients(tuner)
    assert_close(found, truth.detach())
    assert_close(ours, theirs, bound=2e-5)
    assert {"score.weight", "score.bias"} <= {".".join(name.rsplit(".", 2)[1:]) for name in ours}
    right = ((scores > 0) == (labels >= 0.5)).float().mean()
    assert tuner.logged["train_accuracy"] == pytest.approx(float(right))
    assert tuner.logged.keys() == {"train_loss", "train_score", "train_accuracy"} <= tuner.logged_names
    with packed(tuner):
        predicted = tuner.predict_step(collate(documents), 0)
    assert_close(predicted, scores.detach())
    assert batch.context.completions.completions_per_example == (3, 1, 4, 2)


def test_the_loss_is_a_mean_over_steps():
    tuner = make_tuner(RewardTuner, loss="stepwise")
    documents = documents_of_steps()
    total = sum(float(step(tuner, [document], num_items=10)[0]) for document in documents)
    assert total == pytest.approx(float(step(tuner, documents)[0]), rel=1e-5)


@pytest.mark.parametrize("lora", [True, False])
def test_stock_transformers_reads_the_token_classifier(tmp_path, lora):
    from peft import PeftModel
    from transformers import AutoModelForTokenClassification

    tuner, documents = (
        make_tuner(RewardTuner, loss="stepwise", **({} if lora else {"lora": None})),
        documents_of_steps(),
    )
    with torch.no_grad():
        tuner._find_head(tuner.model).bias.fill_(0.3)
    truth = scores_alone(tuner, documents).detach()
    tuner.save_pretrained(str(tmp_path / "saved"))
    if lora:
        tuner.model.unload().save_pretrained(tmp_path / "base")
        classifier = AutoModelForTokenClassification.from_pretrained(tmp_path / "base", num_labels=1)
        classifier = PeftModel.from_pretrained(classifier, str(tmp_path / "saved"))
    else:
        classifier = AutoModelForTokenClassification.from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        found = [
            classifier.eval()(input_ids=torch.as_tensor(document.input_ids)[None]).logits[0, :, 0][
                np.cumsum(document.segment_lengths)[1:] - 1
            ]
            for document in documents
        ]
    assert_close(torch.cat(found), truth)


def make_run(rows, **options):
    torch.manual_seed(0)
    tuner = RewardTuner(
        {**CONFIG, "initializer_range": 0.1}, init="random", dtype="float32", tokenizer=character_tokenizer(),
        loss="stepwise", learning_rate=1e-2, scheduler="constant", warmup_steps=0,
    )  # fmt: skip
    data = quiet_data(rows, max_tokens=128, step_separator="=", **options)
    return tuner, data


def digits(num_rows):
    """A step is right if its last digit is above 4."""
    draws = np.random.default_rng(0)
    steps_N3 = draws.integers(10, size=(num_rows, 3))
    return [
        {"prompt": "1", "completions": [f"2{digit}" for digit in steps], "labels": (steps > 4).tolist()}
        for steps in steps_N3
    ]


@pytest.mark.slow
def test_wrong_steps_are_told_apart(tmp_path):
    rows = digits(120)
    tuner, data = make_run(rows, val_share=0.25, predict_paths=rows[:4])
    trainer = quiet_trainer(tmp_path, strategy=FastFTStrategy(), max_epochs=6, max_steps=-1, accumulate_grad_batches=2)
    trainer.fit(tuner, data)
    assert float(trainer.callback_metrics["val_accuracy"]) > 0.95
    (scores,) = trainer.predict(tuner, datamodule=data)
    (batch,) = data.predict_dataloader()
    labels = [label for number in batch.numbers for label in rows[number]["labels"]]
    assert (scores > 0).tolist() == labels


def test_pairs_are_refused_by_name(tmp_path):
    tuner, data = make_run([{"prompt": "1", "chosen": "2", "rejected": "3"}] * 4)
    with pytest.raises(DataError, match="stepwise"):
        quiet_trainer(tmp_path, strategy=FastFTStrategy(), max_steps=1).fit(tuner, data)
