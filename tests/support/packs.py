"""Packed batches and their documents one by one, for tests of models."""

import numpy as np
import torch

from lightning_fastft.packing.collate import Document, collate
from tests.support.tiny_models import VOCABULARY
from tests.support.truth import relative_error

LENGTHS = (7, 1, 12, 9)


def make_documents(lengths=LENGTHS, *, seed=0, labelled=0.7):
    generator = np.random.default_rng(seed)
    documents = []
    for length in lengths:
        ids = generator.integers(3, VOCABULARY, length)
        documents.append(Document(ids, np.where(generator.random(length) < labelled, ids, -100)))
    return documents


def make_batch(lengths=LENGTHS, *, seed=0, pad_to=None, backend="auto"):
    batch = collate(make_documents(lengths, seed=seed), pad_to=pad_to)
    batch.context.attention_backend = backend
    return batch


# Prompts and completions: a prompt of one token, a single completion, completions of one token.
GROUPS = ((6, 3, 9), (1, 4, 2), (11, 1, 1, 5), (4, 7))


def make_groups(groups=GROUPS, *, seed=0):
    """Documents of a prompt with completions, whose completions are trained."""
    generator = np.random.default_rng(seed)
    documents = []
    for lengths in groups:
        ids = generator.integers(3, VOCABULARY, sum(lengths))
        labels = ids.copy()
        labels[: lengths[0]] = -100
        scores = tuple(generator.normal(size=len(lengths) - 1).tolist())
        log_probs = np.where(labels == -100, 0.0, -generator.random(len(ids))).astype(np.float32)
        documents.append(Document(ids, labels, segment_lengths=lengths, scores=scores, log_probs=log_probs))
    return documents


def separate(documents):
    """Each completion behind a copy of its prompt, as a plain document."""
    plain = []
    for document in documents:
        num_prompt, start = document.segment_lengths[0], document.segment_lengths[0]
        for length in document.segment_lengths[1:]:
            rows = np.r_[0:num_prompt, start : start + length]
            plain.append(Document(document.input_ids[rows], document.labels[rows]))
            start += length
    return plain


def summed_loss(logits, labels):
    """Next-token loss of one row, summed over labelled tokens."""
    return torch.nn.functional.cross_entropy(logits[:-1].float(), labels[1:], reduction="sum", ignore_index=-100)


def run_packed(model, batch):
    """Loss and logits of the packed batch, gradients left in the parameters."""
    output = model(**batch)
    output.loss.backward()
    return output.loss.detach(), output.logits[0].detach()


def run_one_by_one(model, documents, *, num_items):
    """The same numbers, each document in a forward of its own, without padding and without a context."""
    total, logits = 0.0, []
    for document in documents:
        output = model(input_ids=torch.as_tensor(document.input_ids)[None], use_cache=False).logits[0]
        loss = summed_loss(output, torch.as_tensor(document.labels)) / num_items
        loss.backward()
        total += loss.detach()
        logits.append(output.detach())
    return total, torch.cat(logits)


def take_gradients(model):
    """Gradients by parameter name; the model is left without any."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients


def assert_close(value, truth, *, bound=1e-5):
    """Compare tensors, or dicts of them, by relative norm."""
    if isinstance(truth, dict):
        assert value.keys() == truth.keys()
        errors = {name: relative_error(value[name], truth[name]) for name in truth}
        assert max(errors.values()) <= bound, max(errors.items(), key=lambda item: item[1])
    else:
        assert value.shape == truth.shape
        assert relative_error(value, truth) <= bound, relative_error(value, truth)
