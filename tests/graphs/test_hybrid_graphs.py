"""Recorded layers of hybrids: the gated delta rule reads the documents and chunks of the pack that was loaded last."""

import copy
from unittest import mock

import pytest
import torch

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.fused import delta_mixers
from lightning_fastft.graphs import install
from lightning_fastft.graphs.layer_graphs import LayerGraphs
from lightning_fastft.kernels.chunk_gradients.reference import CHUNK
from lightning_fastft.mixers.install import BY_DOCUMENT
from lightning_fastft.packing.chunks import build_chunks
from lightning_fastft.patches.packed import install_packed_training
from tests.fused.test_hybrid_layers import FAMILIES, build
from tests.graphs.test_layer_graphs import CPU, PACKS, RAGGED, Repeating, assert_same, train
from tests.support.layer_pairs import build as build_attention
from tests.support.layer_pairs import fuse, layers_of
from tests.support.packs import make_batch

SIZE = 8


def documents_of(chunks, num_tokens):
    """Return the lengths of a pack from what the kernels read, which must describe all its tokens and no others."""
    lengths = [length for length in chunks.start_S1.diff().tolist() if length]
    own = build_chunks(lengths, chunks.start_S1, chunks.size)
    count = len(own.index_C2)
    assert sum(lengths) == num_tokens
    assert torch.equal(chunks.index_C2[:count], own.index_C2)
    assert torch.equal(chunks.first_S1[: len(lengths) + 1], own.first_S1)
    assert chunks.first_S1[len(lengths) :].eq(count).all()
    documents, places = chunks.index_C2[count:].long().unbind(1)
    assert (places * chunks.size >= chunks.start_S1.diff()[documents]).all()
    return lengths


@pytest.fixture
def delta_rule_reads_chunks(monkeypatch):
    """Let the rule on a CPU read the memory that the kernels of a GPU read."""
    own = delta_mixers.gated_delta

    def gated_delta(rows, *arguments, context, **options):
        with mock.patch.object(context, "lengths", documents_of(context.chunks(SIZE), len(rows))):
            return own(rows, *arguments, context=context, **options)

    monkeypatch.setattr(delta_mixers, "gated_delta", gated_delta)


def prepare(model, policy, recorder=None):
    fuse(model)
    patcher = ModelPatcher()
    install_packed_training(model, patcher, checkpointing=OffloadCheckpointing(policy))
    layers = layers_of(model)
    graphs = LayerGraphs(
        layers, memory_of=lambda layer: [], recorder=recorder, backends=CPU | {BY_DOCUMENT}, chunk_size=SIZE
    )
    if recorder is not None:
        graphs.install(patcher)
    return graphs


@pytest.mark.parametrize("packs", [PACKS, RAGGED])
@pytest.mark.parametrize("policy", ["keep", "recompute"])
@pytest.mark.parametrize(
    ("family", "trained"),
    [("qwen3_5_text", "lora"), ("qwen3_next", "full"), *((name, "lora") for name in FAMILIES if name == "lara_mini")],
)
def test_steps_are_bit_equal_to_those_without(family, trained, policy, packs, delta_rule_reads_chunks):
    model = build(family, trained)
    plain = copy.deepcopy(model)
    graphs = prepare(model, policy, Repeating())
    prepare(plain, policy)
    pad_to = (*map(sum, packs[:2]), 64) if packs is RAGGED else (None,)
    assert_same(train(model, packs), train(plain, packs, pad_to=pad_to))
    assert graphs.num_replays == 2 * (len(packs) - 2), graphs.reasons


def test_a_loaded_context_has_the_chunks_of_the_other_pack():
    first, second = make_batch((7, 1, 12, 12)).context, make_batch((17, 15)).context
    context = first.recordable(num_documents=6, max_length=32, chunk_size=SIZE)
    chunks = context.chunks(SIZE)
    assert documents_of(chunks, 32) == [7, 1, 12, 12]
    context.load(second)
    assert context.chunks(SIZE) is chunks
    assert documents_of(chunks, 32) == [17, 15]
    context.load(make_batch((17, 3)).context)
    assert documents_of(chunks, 32) == [17, 3, 12]


def test_chunks_have_room_for_every_pack():
    # Every document ends one token into a chunk.
    lengths = (SIZE + 1,) * 3 + (1,) * 5
    context = make_batch((sum(lengths),)).context.recordable(
        num_documents=len(lengths), max_length=sum(lengths), chunk_size=SIZE
    )
    context.load(make_batch(lengths).context)
    assert documents_of(context.chunks(SIZE), sum(lengths)) == list(lengths)


@pytest.mark.parametrize(("family", "size"), [*((family, CHUNK) for family in FAMILIES), ("qwen3", None)])
def test_layers_with_mixers_are_recorded_with_their_chunks(family, size):
    model = (build if size else build_attention)(family, "lora")
    fuse(model)
    with mock.patch.object(install, "LayerGraphs") as made:
        assert install.install_layer_graphs(model, ModelPatcher()) == [made.return_value]
    assert made.call_args.kwargs["chunk_size"] == size
