"""Context parallelism over NCCL: two parts of packs give the losses and gradients of whole packs."""

import pytest
import torch

from tests.strategies.context_worker import GPU_CASES
from tests.support.two_ranks import launch_two_ranks

pytestmark = pytest.mark.multi_gpu

# Sums in another order; in bf16 every product is rounded. The planted faults of the CPU tests give 0.2 and more.
BOUNDS = {"float32": 1e-4, "bfloat16": 0.1}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("context")
    launch_two_ranks("tests.strategies.context_worker", "gpu", folder)
    return torch.load(folder / "found.pt", weights_only=True)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", GPU_CASES)
def test_two_parts_give_the_losses_and_gradients_of_the_pack(found, name, dtype):
    errors = found[name, dtype]
    assert max(errors["loss"], errors["gradients"]) <= BOUNDS[dtype], errors
