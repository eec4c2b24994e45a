"""Published rates of GPUs: a loose name finds one, and what was measured on an H200 comes out of its data sheet."""

import pytest

from lightning_fastft.core.errors import OptionError
from lightning_fastft.estimate.machines import GPUS, find_gpu


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("4090", "RTX 4090"),
        ("rtx-4090", "RTX 4090"),
        ("RTX5090", "RTX 5090"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("a100 40 GB", "A100 40GB"),
        ("spark", "DGX Spark (GB10)"),
        ("NVIDIA GB10", "DGX Spark (GB10)"),
        ("b200", "B200"),
        ("l40s", "L40S"),
    ],
)
def test_a_loose_name_finds_one_gpu(name, found):
    assert find_gpu(name).name == found


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_every_gpu_is_found_by_its_own_name_and_says_where_its_rates_are_from(gpu):
    assert find_gpu(gpu.name) is gpu
    assert "nvidia" in gpu.source.lower()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("3090", "not a GPU"),
        ("", "not a GPU"),
        ("rtx", "matches 5"),
        ("NVIDIA GeForce RTX 4070 Ti", "not a GPU"),
        ("RTX 4090 Laptop GPU", "not a GPU"),
        ("A100", "A100 40GB, A100 80GB"),
    ],
)
def test_a_name_that_means_none_or_several_is_refused_with_the_names(name, reason):
    with pytest.raises(OptionError, match=reason):
        find_gpu(name)


def test_the_measured_rates_of_an_h200_come_out_of_its_data_sheet():
    gpu = find_gpu("H200")
    assert gpu.is_measured
    assert gpu.sustained_flops_per_s == pytest.approx(690e12)
    assert gpu.reached_bytes_per_s == pytest.approx(4.3e12)
    assert gpu.machine.d2h_bytes_per_s == gpu.machine.h2d_bytes_per_s == pytest.approx(45.6e9)


def test_only_the_unified_machine_moves_nothing():
    assert [gpu.name for gpu in GPUS if gpu.machine.d2h_bytes_per_s == 0] == ["DGX Spark (GB10)"]
    assert find_gpu("spark").machine.is_unified
