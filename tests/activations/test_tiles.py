"""Tiled feed-forward blocks: the same gradients to rounding, nothing computed more often, and only a tile's
intermediates at a time.
"""

import copy

import pytest
import torch

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.activations.segments import Segment
from lightning_fastft.activations.tiles import install_tiles
from lightning_fastft.core.errors import SwapError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.patches.packed import install_packed_training
from tests.patches.test_value_points import BIG, LENGTHS, CountProducts, adapted
from tests.planner.plan_trials import assert_near, kept_gradients, read_gradients
from tests.support.packs import make_batch
from tests.support.tiny_models import build_tiny


@pytest.mark.parametrize("policy", ["recompute", "offload"])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_gradients_are_those_of_whole_blocks(policy, kind):
    model = build_tiny("llama", **BIG).train() if kind == "full" else adapted()
    batch = make_batch(LENGTHS)
    expected = kept_gradients(model, [batch], 1)
    install_packed_training(model, ModelPatcher(), checkpointing=OffloadCheckpointing(policy, mlp_tiles=3))
    # The second time what nobody needs is left out.
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        model(**batch).loss.backward()
    assert_near(read_gradients(model), expected)


def test_no_product_is_computed_more_often_than_by_recomputing_layers(monkeypatch):
    model, batch = (
        build_tiny("llama", **{**BIG, "num_hidden_layers": 1, "intermediate_size": 96}).train(),
        make_batch(LENGTHS),
    )
    install_packed_training(model, ModelPatcher(), checkpointing=OffloadCheckpointing("recompute", mlp_tiles=2))
    model(**batch).loss.backward()
    count = CountProducts(monkeypatch)
    model(**batch).loss.backward()
    # Two tiles: gate and up run in the forward and again before the backward, down only in the forward.
    assert count.counts[96, 64] == 8
    assert count.counts[64, 96] == 2


def test_an_output_that_is_needed_after_all_is_computed():
    """Gemma 2 normalises the block's output, which the layer's second run must therefore have."""
    model, batch = build_tiny("gemma2").train(), make_batch(LENGTHS)
    expected = kept_gradients(model, [batch], 1)
    checkpointing = OffloadCheckpointing("recompute", mlp_tiles=2)
    install_packed_training(model, ModelPatcher(), checkpointing=checkpointing)
    for segment in checkpointing.last_segments():
        segment.last_point = "mlp"
    model(**batch).loss.backward()
    assert_near(read_gradients(model), expected)


@pytest.mark.gpu
def test_tiles_lower_the_peak():
    peaks = {}
    batch = make_batch((2048,)).to("cuda")
    for num_tiles in (1, 4):
        model = build_tiny("llama", **{**BIG, "intermediate_size": 4096}).to("cuda", torch.bfloat16).train()
        install_packed_training(
            model, ModelPatcher(), checkpointing=OffloadCheckpointing("recompute", mlp_tiles=num_tiles)
        )
        model(**batch).loss.backward()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        model(**batch).loss.backward()
        peaks[num_tiles] = torch.cuda.max_memory_allocated() - base
    assert peaks[4] < 0.5 * peaks[1]


def test_a_block_that_is_swapped_later_runs_its_new_code():
    model, batch = build_tiny("llama", **BIG).train(), make_batch(LENGTHS)
    install_packed_training(model, ModelPatcher(), checkpointing=OffloadCheckpointing("recompute", mlp_tiles=2))
    ran = []
    block = model.model.layers[0].mlp

    class Fused(type(block)):
        def forward(self, x):
            ran.append(x.shape[-2])
            return super().forward(x)

    new = Fused.__new__(Fused)
    new.__dict__ = block.__dict__
    model.model.layers[0]._modules["mlp"] = new
    model(**batch).loss.backward()
    ran.clear()
    model(**batch).loss.backward()
    assert ran == [48, 48, 48, 48]


def test_undo_and_inertness():
    model, batch = build_tiny("llama", **BIG), make_batch(LENGTHS)
    plain, patcher = copy.deepcopy(model), ModelPatcher()
    assert (
        install_tiles(list(model.model.layers), [Segment(index) for index in range(3)], patcher, num_tiles=2)
        == BIG["num_hidden_layers"]
    )
    model.eval()
    plain.eval()
    with torch.no_grad():
        ids = batch["input_ids"]
        assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    patcher.undo()
    assert all("forward" not in vars(module) for module in model.modules())


def test_layers_without_a_dense_block_are_refused():
    with pytest.raises(SwapError, match="mlp_tiles=2: no decoder layer"):
        install_tiles(list(build_tiny("qwen3_moe").model.layers), [Segment(0), Segment(1)], ModelPatcher(), num_tiles=2)
