"""Which of kernel and reference runs: the kernel where it can, unless the reference is named."""

from types import SimpleNamespace

import pytest
import torch

from lightning_fastft.core.errors import OptionError
from lightning_fastft.kernels.backends import choose_module
from lightning_fastft.kernels.repeat_heads import reference

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("device", "dtype", "options", "name"),
    [
        (CPU, torch.bfloat16, {}, "reference"),
        (CUDA, torch.bfloat16, {}, "triton"),
        (CUDA, torch.float64, {}, "reference"),
        (CUDA, torch.float64, {"dtypes": None}, "triton"),
        (CUDA, torch.float32, {"dtypes": (torch.bfloat16,)}, "reference"),
        (CUDA, torch.bfloat16, {"backend": "reference"}, "reference"),
    ],
)
def test_the_kernel_runs_where_it_can_unless_the_reference_is_named(device, dtype, options, name):
    pytest.importorskip("triton")
    module = choose_module(reference, SimpleNamespace(device=device, dtype=dtype), **options)
    assert module.__name__ == f"lightning_fastft.kernels.repeat_heads.{name}"


def test_an_unknown_backend_is_refused():
    with pytest.raises(OptionError, match="'auto', 'reference'"):
        choose_module(reference, torch.ones(1), backend="cuda")
