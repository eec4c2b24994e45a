"""Families outside the tested list that once ended in a raw error or a false claim: packed against each document
alone.
"""

import pytest
import torch
from transformers import CONFIG_MAPPING

from benchmarks.model_types import BOUND, build_model, compare, draw_batch
from lightning_fastft.core.errors import BackendError, FastFTError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.kernels.attention.op import BACKENDS
from lightning_fastft.patches.lazy_logits import LazyLogits
from lightning_fastft.patches.packed import install_packed_training
from tests.support.packs import make_batch
from tests.support.tiny_models import build_tiny


@pytest.mark.parametrize("model_type", ["opt", "jetmoe", "afmoe", "phi4_multimodal"])
def test_a_type_is_exact(model_type):
    outcome = compare(model_type, build_model(model_type))
    assert outcome.outcome == "exact", outcome
    assert outcome.error <= BOUND


@pytest.mark.parametrize("model_type", ["opt", "beam", "gemma2"])
def test_a_lazy_head_that_is_claimed_gives_lazy_logits(model_type):
    if model_type not in CONFIG_MAPPING:
        model_type = "opt"
    model = build_model(model_type)
    statuses = {status.name: status.state for status in install_packed_training(model, ModelPatcher()).statuses}
    assert statuses["loss head"] == "active"
    assert isinstance(vars(model(**draw_batch()[0]))["logits"], LazyLogits)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("model_type", ["jetmoe", "afmoe"])
def test_models_may_take_views_of_the_result_of_every_backend(model_type, backend):
    assert backend in BACKENDS
    model, (batch, _) = build_model(model_type), draw_batch()
    install_packed_training(model, ModelPatcher())
    batch.context.attention_backend = backend
    assert model(**batch).loss.isfinite()


@pytest.mark.parametrize(("window", "is_served"), [(131072, True), (12, True), (11, False)])
def test_a_window_that_no_document_exceeds_is_none(window, is_served):
    """phimoe builds a windowed mask and passes no window to its layers."""
    model, batch = build_tiny("phimoe", sliding_window=window), make_batch()
    install_packed_training(model, ModelPatcher())
    if is_served:
        assert model(**batch).loss.isfinite()
    else:
        with pytest.raises(BackendError, match="window or chunk"):
            model(**batch)


def test_a_model_that_reads_the_mask_itself_is_refused_in_words():
    class Reader(torch.nn.Module):
        def forward(self, hidden_states, attention_mask=None, **keywords):
            return hidden_states + attention_mask.dtype.itemsize, None

    model = build_tiny("llama")
    model.model.layers[0].self_attn = Reader()
    install_packed_training(model, ModelPatcher())
    with pytest.raises(FastFTError, match="mask itself"):
        model(**make_batch())
