"""torch.compile: a prepared model computes what it computes without it, an unprepared one is refused as without it."""

import pytest
import torch

from lightning_fastft.core.errors import ContextError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.patches.packed import install_packed_training
from tests.patches.test_rotary import LIMIT, longrope
from tests.patches.test_unprepared import BagOfWords
from tests.support.packs import make_batch
from tests.support.tiny_models import build_tiny
from tests.support.truth import relative_error

# As inductor, it makes a graph of tensors from what is traced, and compiles no C++.
BACKEND = "aot_eager"
LONGROPE = {
    "head_dim": 8,
    "sliding_window": None,
    "rope_parameters": longrope(4),
    "original_max_position_embeddings": LIMIT,
}
CASES = {
    # One layer: a second one is traced as the first, and tracing is what takes long.
    "qwen3": ({"num_hidden_layers": 1}, {}),
    # The auxiliary loss reads the mask.
    "mixtral": ({}, {"output_router_logits": True}),
    "phi3": (LONGROPE, {}),
    "lfm2": ({}, {}),
}


@pytest.fixture(autouse=True)
def nothing_is_compiled_yet():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def loss_and_gradients(run, model, batch, asked):
    model.zero_grad()
    loss = run(**batch, **asked).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        # As many tokens, so that it runs what was compiled for the first pack. Every other number is traced again.
        pytest.param("qwen3", (12, 1, LIMIT), marks=pytest.mark.slow(seconds=8)),
        *(pytest.param(name, (12, 1, 20), marks=pytest.mark.fault) for name in CASES),
    ],
)
def test_a_prepared_model_computes_the_same(name, lengths):
    options, asked = CASES[name]
    model = build_tiny(name, **options)
    compiled = torch.compile(model, backend=BACKEND)
    install_packed_training(compiled, ModelPatcher())
    for each in ((3, LIMIT + 1, 9), lengths):
        batch = make_batch(each)
        found = loss_and_gradients(compiled, model, batch, asked)
        expected = loss_and_gradients(model, model, plain := make_batch(each), asked)
        assert len(found) == len(expected) > 1
        assert max(map(relative_error, found, expected)) < 1e-6
        assert batch.context.num_reads == plain.context.num_reads > 0


@pytest.mark.slow(seconds=8)
def test_an_unprepared_model_is_refused_also_after_a_pack_of_one_document():
    model = torch.compile(build_tiny("qwen3", attention="sdpa", num_hidden_layers=1), backend=BACKEND)
    assert model(**make_batch((9,))).loss.isfinite()
    with pytest.raises(ContextError, match="without packed attention"):
        model(**make_batch())


@pytest.mark.fault
def test_a_model_is_refused_when_its_preparation_is_undone():
    model = torch.compile(build_tiny("qwen3", attention="sdpa"), backend=BACKEND)
    install_packed_training(model, patcher := ModelPatcher())
    assert model(**make_batch()).loss.isfinite()
    patcher.undo()
    with pytest.raises(ContextError, match="without packed attention"):
        model(**make_batch())


def test_code_outside_transformers_reads_the_mask():
    loss, num_tokens, is_whole = torch.compile(BagOfWords(), backend=BACKEND)(**make_batch())
    loss.backward()
    assert num_tokens == 29
    assert is_whole
