"""The stand-in for flash-attn: each document equals SDPA on it alone, and records name it."""

import importlib
import sys

import pytest
import torch

from benchmarks.ruler import driver, flash_attn_stand_in
from benchmarks.ruler.attention import describe_attention
from tests.support.flash_attn import CASES, compare_with_sdpa


@pytest.mark.parametrize("case", CASES, ids=str)
def test_documents_are_those_of_sdpa_on_each_alone(case):
    compare_with_sdpa(case, device="cpu", dtype=torch.float64, bound=1e-12)


def test_a_batch_is_its_rows():
    q, k, v = (torch.randn(2, 5, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    found = flash_attn_stand_in.flash_attn_func(q, k, v, causal=True)
    truth = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(found, truth.transpose(1, 2))


def test_rows_are_unpadded_and_padded_again():
    x = torch.randn(2, 3, 4)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    rows, indices, offsets, longest, lengths = flash_attn_stand_in.unpad_input(x, mask)
    assert (offsets.tolist(), longest, lengths.tolist()) == ([0, 2, 5], 3, [2, 3])
    assert torch.equal(flash_attn_stand_in.pad_input(rows, indices, 2, 3), x * mask[..., None])


@pytest.mark.parametrize("options", [{"softcap": 30.0}, {"alibi_slopes": [1.0]}, {"return_attn_probs": True}])
def test_what_torch_does_not_have_is_refused(options):
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(NotImplementedError, match=next(iter(options))):
        flash_attn_stand_in.flash_attn_func(q, q, q, **options)


def test_the_package_is_imported_as_flash_attn_and_named_in_records(tmp_path, monkeypatch):
    class Model:
        class config:
            _attn_implementation = "flash_attention_2"

    assert describe_attention(Model) == "flash_attention_2"
    monkeypatch.syspath_prepend(str(flash_attn_stand_in.write_package(tmp_path)))
    for name in ("flash_attn", "flash_attn.bert_padding", "flash_attn.flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, importlib.import_module(name))
    assert sys.modules["flash_attn"].flash_attn_varlen_func is flash_attn_stand_in.flash_attn_varlen_func
    assert importlib.metadata.version("flash-attn") == "2.8.3"
    assert describe_attention(Model) == f"flash_attention_2 ({flash_attn_stand_in.SUMMARY})"


@pytest.mark.parametrize(
    ("system", "device", "has_own", "is_given"),
    [("trl", "cuda", False, True), ("trl", "cuda", True, False), ("ours", "cuda", False, False), ("plain", "cpu", False, False)],
)  # fmt: skip
def test_a_peer_on_a_gpu_finds_the_stand_in_where_flash_attn_is_missing(
    system, device, has_own, is_given, monkeypatch, tmp_path
):
    monkeypatch.setenv("PYTHONPATH", "/own")
    monkeypatch.setattr(driver.importlib.util, "find_spec", lambda name: object() if has_own else None)
    path = driver.environment_of(system, device=device, folder=tmp_path / "stand_in")["PYTHONPATH"]
    assert path == (f"{tmp_path / 'stand_in'}:/own" if is_given else "/own")
    assert (tmp_path / "stand_in/flash_attn/__init__.py").exists() == is_given
