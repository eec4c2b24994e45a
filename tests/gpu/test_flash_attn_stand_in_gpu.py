"""The stand-in for flash-attn on a GPU: torch's FA2 kernels give each document what SDPA gives it alone."""

import pytest
import torch

from tests.support.flash_attn import CASES, compare_with_sdpa

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES, ids=str)
def test_documents_are_those_of_sdpa_on_each_alone(case):
    compare_with_sdpa(case, device="cuda", dtype=torch.bfloat16, bound=0.02)
