"""Which of kernel and twin runs: as named, else the kernel where it can."""

from types import SimpleNamespace

import pytest
import torch

from lightning_fastft.core.errors import OptionError
from lightning_fastft.kernels.backends import choose_module, uses_triton
from lightning_fastft.kernels.repeat_heads import reference

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("backend", "device", "dtype", "expected"),
    [
        ("auto", CPU, None, False),
        ("auto", CUDA, None, True),
        ("auto", CUDA, torch.bfloat16, True),
        ("auto", CUDA, torch.float64, False),
        ("triton", CUDA, torch.float32, True),
        ("reference", CUDA, torch.bfloat16, False),
        ("reference", CPU, torch.float64, False),
    ],
)
def test_the_kernel_runs_where_it_can_unless_the_twin_is_named(backend, device, dtype, expected):
    assert uses_triton(backend, device, dtype=dtype) is expected


@pytest.mark.parametrize(
    ("backend", "device", "dtype", "message"),
    [
        ("triton", CPU, None, "takes tensors on CUDA, got cpu"),
        ("triton", CUDA, torch.float64, "takes bf16, fp16 and fp32 on CUDA, got torch.float64 on cuda"),
        ("cuda", CPU, None, "backend must be one of 'auto', 'triton', 'reference'"),
    ],
)
def test_a_named_kernel_that_cannot_run_is_refused(backend, device, dtype, message):
    with pytest.raises(OptionError, match=message):
        uses_triton(backend, device, dtype=dtype)


@pytest.mark.parametrize(
    ("device", "dtype", "any_dtype", "name"),
    [
        (CPU, torch.bfloat16, False, "reference"),
        (CUDA, torch.bfloat16, False, "triton"),
        (CUDA, torch.float64, False, "reference"),
        (CUDA, torch.float64, True, "triton"),
    ],
)
def test_the_module_next_to_the_reference_is_chosen(device, dtype, any_dtype, name):
    pytest.importorskip("triton")
    module = choose_module(reference, "auto", SimpleNamespace(device=device, dtype=dtype), any_dtype=any_dtype)
    assert module.__name__ == f"lightning_fastft.kernels.repeat_heads.{name}"
