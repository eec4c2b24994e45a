"""Hybrids on a GPU: packed documents on the kernels of fla-core against the model's own forward of each document."""

import pytest
import torch

pytest.importorskip("fla", reason="needs fla-core")

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.mixers.install import ON_KERNELS
from lightning_fastft.patches.packed import install_packed_training
from tests.support.host_waits import waits_are_errors
from tests.support.packs import assert_close, make_batch, make_documents, run_packed, summed_loss, take_gradients
from tests.support.tiny_models import build_tiny

pytestmark = pytest.mark.gpu

LENGTHS = (7, 1, 130, 2, 64)
NAMES = ("lfm2", "qwen3_next", "qwen3_5_text", "olmo_hybrid")
# The kernels multiply float32 in TF32.
BOUND = 5e-3


def run_alone(model, *, num_items):
    """Logits of each document in a forward of its own, gradients left in the parameters."""
    logits = []
    for document in make_documents(LENGTHS):
        ids, labels = (torch.as_tensor(values, device="cuda") for values in document)
        logits.append(model(input_ids=ids[None], use_cache=False).logits[0])
        (summed_loss(logits[-1], labels) / num_items).backward()
    return torch.cat(logits).detach()


@pytest.mark.parametrize("policy", ["keep", "recompute"])
@pytest.mark.parametrize("name", NAMES)
def test_packed_documents_are_computed_as_each_alone(name, policy):
    model, batch = build_tiny(name).cuda(), make_batch(LENGTHS).to("cuda")
    install_packed_training(model, patcher := ModelPatcher(), checkpointing=OffloadCheckpointing(policy))
    batch.context.output_logits = True
    _, logits = run_packed(model, batch)
    gradients = take_gradients(model)
    assert batch.context.reads[ON_KERNELS] > 0
    patcher.undo()
    assert_close(logits, run_alone(model, num_items=batch.context.num_items), bound=BOUND)
    assert_close(gradients, take_gradients(model), bound=BOUND)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5_text"])
def test_a_step_never_waits_for_the_device(name):
    model = build_tiny(name).cuda()
    install_packed_training(model, ModelPatcher())
    # Kernels are compiled and tuned in the first step.
    model(**make_batch(LENGTHS).to("cuda")).loss.backward()
    batch = make_batch(LENGTHS).to("cuda")
    torch.cuda.synchronize()
    with waits_are_errors():
        model(**batch).loss.backward()
