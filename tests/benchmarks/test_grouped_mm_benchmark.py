"""The benchmark of grouped products in its tiny form on a CPU."""

import pytest
import torch

from benchmarks import grouped_mm
from benchmarks.grouped_mm import AdapterCase, adapter_cases, main


def test_the_table_of_adapters_has_every_step_of_both_models(tmp_path, capsys):
    assert main(["--out", str(tmp_path), "--adapters", "--device", "cpu", "--runs", "2"]) == 0
    lines = (tmp_path / "adapters.txt").read_text().splitlines()
    assert all(line in capsys.readouterr().out for line in lines[:1])
    # Two models, two products, two directions: a thin product twice, its gradient, a sum, a product with addend twice.
    assert len(lines) == 2 * 2 * 2 * 6
    assert not any("WRONG" in line or "refused" in line for line in lines)
    for part in ("gate_up thin ", "down dX thin gradient", "add to rows", "+ low rank + bias", "torch + add to rows"):
        assert any(part in line for line in lines), part
    assert {line.split()[-1] for line in lines} == {"TB/s", "TFLOP/s"}


def test_a_wrong_result_is_no_time(tmp_path, monkeypatch):
    real = grouped_mm.grouped_mm
    monkeypatch.setattr(grouped_mm, "grouped_mm", lambda *arguments, **options: real(*arguments, **options) * 1.1)
    assert main(["--out", str(tmp_path), "--adapters", "--device", "cpu", "--runs", "1", "--cases", "thin"]) == 1
    assert "WRONG" in (tmp_path / "adapters.txt").read_text()


@pytest.mark.parametrize("model", grouped_mm.MODELS)
def test_bytes_and_operations_are_those_of_the_tensors(model):
    for adapter_case in adapter_cases(is_small=True):
        if not adapter_case.case.name.startswith(model):
            continue
        inputs = grouped_mm.make_inputs(adapter_case.case, "balanced", device="cpu")
        assert adapter_case.num_bytes in (0, bytes_of(adapter_case, inputs)), adapter_case.case.name


def bytes_of(adapter_case: AdapterCase, inputs: grouped_mm.Inputs) -> int:
    def size(*tensors: torch.Tensor) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    if adapter_case.kind == "add":
        return 2 * size(inputs.d_NO) + size(inputs.addend.low_NR, inputs.addend.low_ERO)
    if adapter_case.kind == "grad":
        return size(inputs.x_NI, inputs.d_NO) + 2 * size(inputs.weight_EIO)
    return size(inputs.x_NI, inputs.weight_EIO, inputs.d_NO)
