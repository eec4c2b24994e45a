"""The mask carries the context into layers that drop keywords; indexers choose all keys of a short document."""

import pytest
import torch

from benchmarks.model_types import build_model, compare
from lightning_fastft.core.errors import BackendError, UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.packing.collate import collate
from lightning_fastft.patches import carriers
from lightning_fastft.patches.packed import install_packed_training
from tests.support.packs import make_batch, make_documents


@pytest.mark.parametrize("model_type", ["nemotron", "glm_moe_dsa"])
def test_a_family_that_needs_a_carrier_is_exact(model_type):
    outcome = compare(model_type, build_model(model_type))
    assert (outcome.outcome, outcome.attention) == ("exact", "auto"), outcome


def test_without_the_carrier_nothing_reads(monkeypatch):
    """Plant: the hook hands nothing over."""
    monkeypatch.setattr(carriers, "_give_context_to_mask", lambda *_: None)
    model, batch = build_model("nemotron"), make_batch()
    install_packed_training(model, ModelPatcher())
    model(**batch)
    assert batch.context.num_reads == 0


def set_limit(model, limit):
    for module in model.modules():
        if hasattr(module, "index_topk"):
            module.index_topk = limit


@pytest.mark.parametrize(("limit", "is_served"), [(12, True), (11, False)])
def test_documents_beyond_the_limit_of_an_indexer_are_refused(limit, is_served):
    model, batch = build_model("deepseek_v32"), make_batch()
    set_limit(model, limit)
    (status,) = [
        status
        for status in install_packed_training(model, ModelPatcher()).statuses
        if status.name == "sparse attention"
    ]
    assert f"up to {limit} tokens" in status.reason
    if is_served:
        assert model(**batch).loss.isfinite()
    else:
        with pytest.raises(UnsupportedModelError, match=r"deepseek_v32.*index_topk.*12 tokens"):
            model(**batch)


def test_without_a_context_the_indexer_chooses():
    """Evaluation of padded rows and generation under packed attention: the chosen keys alone are seen."""
    model, ids = build_model("deepseek_v32"), torch.arange(3, 23)[None]
    set_limit(model, 4)
    expected = model(input_ids=ids, use_cache=False).logits
    install_packed_training(model, ModelPatcher())
    assert torch.allclose(model(input_ids=ids, use_cache=False).logits, expected, atol=1e-5)


def test_llama4_refuses_documents_beyond_its_chunk_and_packs_beyond_its_scale():
    model = build_model("llama4_text")
    chunk = min(
        value for name, value in vars(model.config).items() if name == "attention_chunk_size" and isinstance(value, int)
    )
    install_packed_training(model, ModelPatcher())
    assert model(**make_batch()).loss.isfinite()
    scales = [part for part in model.modules() if getattr(part, "attn_temperature_tuning", False)]
    assert chunk > 12
    for part in scales:
        part.use_rope, part.floor_scale = False, 29
    install_packed_training(model, ModelPatcher())
    with pytest.raises(UnsupportedModelError, match="attn_temperature_tuning"):
        model(**make_batch())


def test_a_chunk_that_a_document_exceeds_is_refused():
    model = build_model("llama4_text")
    model.config.attention_chunk_size = 11
    model.config.layer_types = ["chunked_attention"] * model.config.num_hidden_layers
    install_packed_training(model, ModelPatcher())
    assert model(**collate(make_documents((7, 11)))).loss.isfinite()
    with pytest.raises(BackendError, match="window or chunk of 11"):
        model(**make_batch())
