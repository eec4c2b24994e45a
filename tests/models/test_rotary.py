"""Length-dependent rotary scaling: a document of a pack gets the angles, the loss and the gradients that it has alone."""

import copy

import pytest
import torch

from lightning_fastft.models.packed import install_packed_training
from lightning_fastft.models.rotary import document_lengths, install_rotary
from lightning_fastft.models.swap import SwapLedger
from lightning_fastft.offload.checkpointing import OffloadCheckpointing
from tests.models.packs import make_batch, make_documents, relative_error, run_one_by_one, run_packed, take_gradients
from tests.models.tiny_models import VOCABULARY, build_tiny

# Below, at and above the limit of 16.
LENGTHS = (7, 20, 16, 1, 17, 9, 31, 20)
LIMIT = 16
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": LIMIT,
}


def build(kind):
    if kind == "phi3 longrope":
        return build_tiny("phi3", head_dim=8, rope_parameters=LONGROPE, original_max_position_embeddings=LIMIT, max_position_embeddings=64)
    if kind == "llama longrope":
        return build_tiny("llama", head_dim=8, rope_parameters=LONGROPE, max_position_embeddings=64)
    if kind == "llama dynamic":
        rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
        return build_tiny("llama", rope_parameters=rope, max_position_embeddings=LIMIT)
    from transformers import PhimoeConfig, PhimoeForCausalLM

    config = PhimoeConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, max_position_embeddings=64, router_jitter_noise=0.0, input_jitter_noise=0.0, sliding_window=None,
        rope_parameters=LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.3},
    )  # fmt: skip
    torch.manual_seed(0)
    return PhimoeForCausalLM(config)


class Fresh:
    """A model whose rotary embedding forgets each row: dynamic scaling remembers the longest one."""

    def __init__(self, model):
        self.model = model

    def __call__(self, **kwargs):
        self.model.get_decoder().rotary_emb(torch.zeros(1), torch.zeros(1, 1, dtype=torch.long))
        return self.model(**kwargs)


KINDS = ["phi3 longrope", "llama longrope", "llama dynamic", "phimoe longrope"]


@pytest.mark.parametrize("policy", [None, "recompute"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_equals_alone_on_both_sides_of_the_limit(kind, policy):
    model = build(kind).train()
    plain = copy.deepcopy(model)
    ledger = SwapLedger()
    statuses = install_packed_training(model, ledger, checkpointing=OffloadCheckpointing(policy) if policy else None).statuses
    assert [status.state for status in statuses if status.name == "rotary scaling"] == ["active"]
    documents, batch = make_documents(LENGTHS), make_batch(LENGTHS)
    expected, _ = run_one_by_one(Fresh(plain), documents, num_items=batch.context.num_items)
    loss, _ = run_packed(model, batch)
    assert relative_error(loss, expected) < 1e-6
    truth = take_gradients(plain)
    found = take_gradients(model)
    assert max(relative_error(found[name], truth[name]) for name in truth) < 1e-4
    ledger.undo()
    assert "forward" not in vars(model.get_decoder().rotary_emb)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_without_the_change_a_long_neighbour_is_seen(kind):
    """The fault that is mended: transformers gives all documents the factors of the longest."""
    rotary = build(kind).get_decoder().rotary_emb
    together = torch.tensor([[*range(8), *range(20)]])
    alone = rotary(torch.zeros(1), torch.arange(8)[None])[0]
    assert not torch.allclose(rotary(torch.zeros(1), together)[0][:, :8], alone)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_rows_that_are_no_pack_keep_the_angles_of_transformers(kind):
    model = build(kind)
    plain = copy.deepcopy(model).get_decoder().rotary_emb
    install_rotary(model, SwapLedger())
    rotary = model.get_decoder().rotary_emb
    one_step_of_generation, continued = torch.tensor([[25]]), torch.arange(5, 25)[None]
    padded = torch.stack([torch.arange(20), torch.arange(20).clamp(max=8)])
    for position_ids in (torch.arange(12)[None], torch.arange(20)[None], continued, one_step_of_generation, padded):
        for angles, expected in zip(rotary(torch.zeros(1), position_ids), plain(torch.zeros(1), position_ids)):
            assert torch.equal(angles, expected)


def test_other_scalings_are_left_alone():
    model = build_tiny("llama")
    assert install_rotary(model, ledger := SwapLedger()) is None
    assert len(ledger) == 0


def test_lengths_follow_positions():
    position_ids = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    assert document_lengths(position_ids)[0].tolist() == [length for length in LENGTHS for _ in range(length)]
