"""Completions that share a prompt in a pack: the same loss and gradients as each completion behind a prompt of its own."""

import pytest
import torch

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.hf.families import find_sharing_obstacle
from lightning_fastft.packing import context as context_module
from lightning_fastft.packing.collate import collate
from lightning_fastft.patches.packed import install_packed_training
from tests.support.packs import assert_close, make_groups, run_one_by_one, separate, take_gradients
from tests.support.tiny_models import TINY, build_tiny

pytestmark = pytest.mark.covering


def train_shared(model, documents, *, backend="auto", **options):
    """Loss and gradients of a pack whose prompts are there once."""
    patcher = ModelPatcher()
    install_packed_training(model, patcher, **options)
    batch = collate(documents)
    batch.context.attention_backend = backend
    try:
        output = model(**batch)
        output.loss.backward()
    finally:
        patcher.undo()
    return output.loss.detach(), take_gradients(model), batch


def train_alone(model, documents, *, num_items):
    loss, _ = run_one_by_one(model, separate(documents), num_items=num_items)
    return loss, take_gradients(model)


@pytest.mark.parametrize("name", TINY)
def test_shared_prompts_equal_prompts_of_their_own(name):
    model, documents = build_tiny(name), make_groups()
    loss, gradients, batch = train_shared(model, documents)
    true_loss, true_gradients = train_alone(model, documents, num_items=batch.context.num_items)
    assert_close(loss, true_loss)
    assert_close(gradients, true_gradients)
    assert batch.context.num_tokens < sum(len(document.input_ids) for document in separate(documents))


@pytest.mark.parametrize("policy", ["recompute", "offload"])
def test_shared_prompts_under_checkpointing(policy):
    model, documents = build_tiny("qwen3"), make_groups()
    loss, gradients, _ = train_shared(model, documents)
    again, same, _ = train_shared(model, documents, checkpointing=OffloadCheckpointing(policy))
    assert torch.equal(loss, again)
    assert all(torch.equal(gradients[name], same[name]) for name in gradients)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_backends_agree_on_shared_prompts(backend):
    model, documents = build_tiny("mistral_windowed"), make_groups()
    loss, gradients, batch = train_shared(model, documents, backend=backend)
    true_loss, true_gradients = train_alone(model, documents, num_items=batch.context.num_items)
    assert batch.context.reads.keys() == {backend}
    assert_close(loss, true_loss)
    assert_close(gradients, true_gradients)


def test_one_by_one_runs_each_completion_behind_its_prompt():
    model, documents = build_tiny("llama"), make_groups()
    loss, gradients, batch = train_shared(model, documents, attention="one_by_one")
    true_loss, true_gradients = train_alone(model, documents, num_items=batch.context.num_items)
    assert_close(loss, true_loss)
    assert_close(gradients, true_gradients)


@pytest.mark.parametrize("fault", ["a completion sees its sibling", "positions restart"])
def test_a_fault_in_the_segments_shows(fault, monkeypatch):
    model, documents = build_tiny("llama"), make_groups()
    build = context_module.BatchContext.__init__

    def wrong(self, **arguments):
        build(self, **arguments)
        if fault == "positions restart":
            self.position_T = torch.cat([torch.arange(length) for length in self.lengths])
        else:
            begin_T, end_T = self.prefix_keys.range_2T
            own_T = self.start_S1.long()[self.document_T.long()]
            self.prefix_keys = self.prefix_keys._replace(
                range_2T=torch.stack([begin_T, torch.where(end_T > begin_T, own_T, end_T)])
            )

    monkeypatch.setattr(context_module.BatchContext, "__init__", wrong)
    _, gradients, batch = train_shared(model, documents)
    _, true_gradients = train_alone(model, documents, num_items=batch.context.num_items)
    with pytest.raises(AssertionError):
        assert_close(gradients, true_gradients)


def test_hybrids_refuse_shared_prompts_and_take_copies():
    model, documents = build_tiny("qwen3_next"), make_groups()
    with pytest.raises(UnsupportedModelError, match="share_prompts=False"):
        train_shared(model, documents)
    assert "recurrent" in find_sharing_obstacle(model.config)
