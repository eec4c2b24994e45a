"""What a dtype name means on a device, and which Trainer precision leaves it alone."""

import pytest
import torch

from lightning_fastft.core.errors import OptionError
from lightning_fastft.hf.dtypes import check_precision, resolve_dtype, seeded

CPU = torch.device("cpu")

ALLOWED = [
    ("32-true", "auto", torch.float32, True),
    ("32-true", "bfloat16", torch.float32, True),
    ("32-true", "float32", torch.float32, False),
    ("bf16-true", "bfloat16", torch.bfloat16, True),
    ("bf16-true", "bfloat16", torch.float32, False),
    ("16-mixed", "float16", torch.float32, True),
]
REFUSED = [
    ("32-true", "float16", torch.float32, True),
    ("bf16-true", "bfloat16", torch.float32, True),
    ("bf16-true", "float32", torch.float32, False),
    ("16-mixed", "float32", torch.float32, True),
    ("16-mixed", "float16", torch.float32, False),
    ("16-mixed", "float16", torch.bfloat16, True),
    ("bf16-mixed", "bfloat16", torch.float32, True),
    ("16-true", "float16", torch.float32, True),
    ("64-true", "float32", torch.float32, False),
    ("nf4", "bfloat16", torch.float32, True),
    ("transformer-engine", "bfloat16", torch.float32, True),
]


@pytest.mark.parametrize(("precision", "dtype", "adapter_dtype", "has_adapters"), ALLOWED)
def test_precision_that_changes_nothing_is_served(precision, dtype, adapter_dtype, has_adapters):
    check_precision(precision, dtype=dtype, adapter_dtype=adapter_dtype, has_adapters=has_adapters, is_fit=True)


@pytest.mark.parametrize(("precision", "dtype", "adapter_dtype", "has_adapters"), REFUSED)
def test_precision_that_would_change_a_dtype_is_refused_with_the_line_to_change(
    precision, dtype, adapter_dtype, has_adapters
):
    with pytest.raises(OptionError, match=r"Trainer\(precision='(32-true|16-mixed)'\)"):
        check_precision(precision, dtype=dtype, adapter_dtype=adapter_dtype, has_adapters=has_adapters, is_fit=True)


def test_auto_dtype_is_fp32_where_bf16_is_not_computed(monkeypatch):
    assert resolve_dtype("auto", device=CPU) == torch.float32
    assert resolve_dtype("bfloat16", device=CPU) == torch.bfloat16
    for has_bf16, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(
            torch.cuda,
            "is_bf16_supported",
            lambda including_emulation=True, answer=has_bf16: answer and not including_emulation,
        )
        assert resolve_dtype("auto", device=torch.device("cuda", 0)) == expected
    with pytest.raises(OptionError, match="'auto'"):
        resolve_dtype("fp8", device=CPU)


def test_seeded_draws_the_same_and_leaves_the_global_generator():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    drawn = []
    for seed in (1, 1, 2):
        with seeded(seed, device=CPU):
            drawn.append(torch.rand(2))
    assert torch.equal(torch.rand(2), expected)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
