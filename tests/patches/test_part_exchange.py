"""What a model refuses on a part of a pack, on a group of one rank; the exchange is tested on several ranks in
tests/strategies/test_context_parallel.py.
"""

import pytest
import torch
import torch.distributed as dist

from lightning_fastft.core.errors import BackendError, ContextError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.patches.packed import install_packed_training
from lightning_fastft.patches.part_exchange import check_heads
from tests.support.packs import make_batch
from tests.support.tiny_models import build_tiny


@pytest.fixture(scope="module")
def model():
    model = build_tiny("llama")
    install_packed_training(model, ModelPatcher())
    return model


@pytest.fixture
def part():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return make_batch((7, 1, 4)).cut(0, num_parts=1, group=dist.group.WORLD)


def test_the_only_part_has_the_loss_of_the_pack(model, part):
    assert float(model(**part).loss.detach()) == pytest.approx(float(model(**make_batch((7, 1, 4))).loss.detach()))


@pytest.mark.parametrize("change", ["labels", "output_logits", "objective", "logits_to_keep"])
def test_losses_other_than_that_of_the_pack_are_refused(model, part, change):
    options = dict(part)
    if change == "labels":
        options["labels"] = part["labels"].clone()
    elif change == "objective":
        part.context.objective = lambda logits: logits.hidden.sum()
    else:
        options[change] = 3 if change == "logits_to_keep" else True
    with pytest.raises(ContextError, match="context_parallel=1"):
        model(**options)


@pytest.mark.parametrize("read", [lambda logits: logits + 1, lambda logits: logits.log_probs(), torch.exp])
def test_logits_of_a_part_are_refused(model, part, read):
    logits = model(**part).logits
    with pytest.raises(ContextError, match="context_parallel=1"):
        read(logits)


def test_heads_that_the_ranks_do_not_divide_are_refused():
    with pytest.raises(BackendError, match="6 query heads"):
        check_heads(6, num_parts=4)
