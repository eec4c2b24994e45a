"""The gradient is the exact token mean: packed, unpacked, accumulated and over ranks it equals that of one big
batch.
"""

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything

from tests.support.token_weighting_worker import (
    ONE_RANK,
    TWO_RANKS,
    flat_gradient,
    gradient,
    make_module,
    micro_batches,
    ragged_examples,
)
from tests.support.training_parts import VOCAB_SIZE, PlainModule, quiet_data, quiet_trainer, tiny_llama
from tests.support.two_ranks import run_two_ranks

pytestmark = pytest.mark.covering

KINDS = ("ours", "ours_lora", "stock")
BOUND = 1e-6


def difference(found, truth):
    return float((found.double() - truth.double()).norm() / truth.double().norm())


@pytest.fixture(scope="module")
def one_big_batch():
    return {kind: gradient(kind, micro_batches(accumulate=1)) for kind in KINDS}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "gradients"
    run_two_ranks("tests.support.token_weighting_worker", path)
    return [torch.load(f"{path}.{rank}", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("partition", ONE_RANK)
def test_gradient_does_not_depend_on_packing_and_accumulation(one_big_batch, kind, partition):
    found = gradient(kind, micro_batches(accumulate=ONE_RANK[partition]))
    assert difference(found, one_big_batch[kind]) <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("partition", TWO_RANKS)
def test_gradient_does_not_depend_on_ranks(one_big_batch, two_ranks, kind, partition):
    assert torch.equal(two_ranks[0][kind, partition], two_ranks[1][kind, partition])
    assert difference(two_ranks[0][kind, partition], one_big_batch[kind]) <= BOUND


@pytest.mark.parametrize("kind", KINDS)
def test_one_big_batch_is_as_near_to_float64_as_single_documents(one_big_batch, kind):
    truth = single_document_gradient(kind, torch.float64)
    plain_error = difference(single_document_gradient(kind, torch.float32), truth)
    assert difference(one_big_batch[kind], truth) <= max(BOUND, 2 * plain_error)


def single_document_gradient(kind, dtype):
    """The same weights, one document at a time, by transformers and PEFT alone."""
    seed_everything(0, verbose=False)
    module = make_module(kind)
    module.configure_model()
    module.teardown("fit")
    model = module.model.to(dtype)
    (model.get_base_model() if kind == "ours_lora" else model).set_attn_implementation("eager")
    documents = ragged_examples()
    window_tokens = sum(int((document.labels[1:] != -100).sum()) for document in documents)
    for document in documents:
        ids, labels = torch.from_numpy(document.input_ids)[None], torch.from_numpy(document.labels)[None]
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        (
            torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum", ignore_index=-100) / window_tokens
        ).backward()
    return flat_gradient(module)


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_means_per_micro_batch_would_be_seen(one_big_batch, kind):
    # The usual fault: every micro-batch is divided by its own labelled tokens.
    batches = micro_batches(accumulate=4)
    for batch in batches:
        batch._items["num_items_in_batch"] = float(batch.context.num_labelled)
    assert difference(gradient(kind, batches), one_big_batch[kind]) > 1e-2


class LoggedMeans(PlainModule):
    """Logs the epoch mean of its loss, and adds up the loss of all tokens."""

    total = num_labelled = 0.0

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        self.total += float(loss.detach()) * batch["num_items_in_batch"]
        self.num_labelled += batch.context.num_labelled
        return loss


@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_epoch_mean_of_a_users_loss_is_the_mean_per_labelled_token(tmp_path, accumulate):
    rng = np.random.default_rng(0)
    rows = []
    for length in rng.integers(5, 40, size=60):
        ids = rng.integers(1, VOCAB_SIZE, size=length)
        # Four labels in each row: packs of short rows have more of them. A window's share is a whole number.
        rows.append({"input_ids": ids.tolist(), "labels": np.where(np.arange(length) < length - 4, -100, ids).tolist()})
    module = LoggedMeans(tiny_llama(), lr=0.0)
    with torch.no_grad():
        module.model.lm_head.weight.normal_(std=1.0)
    trainer = quiet_trainer(tmp_path, strategy="fastft", max_steps=-1, max_epochs=1, accumulate_grad_batches=accumulate)
    trainer.fit(module, quiet_data(rows, max_tokens=64))
    assert module.num_labelled == 4 * len(rows)
    assert float(trainer.callback_metrics["train_loss"]) == pytest.approx(module.total / module.num_labelled, rel=1e-6)
