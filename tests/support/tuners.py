"""Tuners with completions on tiny models: prepared for packed batches, and the same numbers one completion at a time."""

import contextlib

import torch

from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.packing.collate import collate
from lightning_fastft.patches.packed import install_packed_training
from lightning_fastft.training.reference import ADAPTERS_OFF, ReferenceTuner
from tests.support.packs import make_groups, separate
from tests.support.sizes import tiny_qwen3
from tests.support.tiny_models import VOCABULARY

CONFIG = tiny_qwen3(vocab=VOCABULARY, pad_token_id=0, tie_word_embeddings=False)
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}
PAIRS = ((6, 3, 9), (1, 4, 2), (11, 1, 5), (3, 2, 2))


def make_tuner(tuner_class, *, model=None, lora=LORA, **options):
    """A built tuner in float32 whose logs go nowhere; the base is its reference unless options name another."""
    torch.manual_seed(0)
    if lora is not None and issubclass(tuner_class, ReferenceTuner):
        options.setdefault("reference", ADAPTERS_OFF)
    source = {"init": "random", "dtype": "float32"} if model is None else {}
    tuner = tuner_class(CONFIG if model is None else model, lora=lora, **source, **options)
    tuner.configure_model()
    with torch.no_grad():
        for parameter in tuner.model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.15)
    tuner.logged = {}
    tuner.log = lambda name, value, **_: tuner.logged.update({name: float(value.detach())})
    return tuner


@contextlib.contextmanager
def packed(tuner):
    """Prepare the models inside a tuner for packed batches, for the time of a block."""
    patcher = ModelPatcher()
    try:
        install_packed_training(tuner, patcher)
        yield
    finally:
        patcher.undo()


def step(tuner, documents, *, num_items=None, **options):
    """Loss and gradients of one training step on one pack."""
    count = {"token": None, "completion": None, "example": len(documents)}[tuner.data_needs.loss_unit]
    if tuner.data_needs.loss_unit == "completion":
        count = sum(len(document.segment_lengths) - 1 for document in documents)
    batch = collate(documents, num_items=num_items or count, **options)
    tuner.zero_grad()
    with packed(tuner):
        loss = tuner.training_step(batch, 0)
        loss.backward()
    return loss.detach(), gradients(tuner), batch


def gradients(tuner):
    found = {name: parameter.grad.clone() for name, parameter in tuner.named_parameters() if parameter.grad is not None}
    tuner.zero_grad()
    return found


def rows_alone(model, documents):
    """Log-probabilities and logits of the trained tokens of each completion, each behind its prompt in a forward of its
    own, by plain transformers.
    """
    found = []
    for document in separate(documents):
        logits = model(input_ids=torch.as_tensor(document.input_ids)[None], use_cache=False).logits[0, :-1].float()
        targets = torch.as_tensor(document.labels)[1:]
        chosen = targets != -100
        logits, targets = logits[chosen], targets[chosen]
        found.append((logits.log_softmax(-1).gather(1, targets[:, None])[:, 0], logits))
    return found


def pairs(lengths=PAIRS, *, seed=0):
    return make_groups(lengths, seed=seed)
