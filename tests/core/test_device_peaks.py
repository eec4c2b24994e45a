"""Names of devices as CUDA gives them, and what they can do."""

import pytest

from lightning_fastft.core.device_peaks import peak_bf16_flops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5e12),
        ("NVIDIA H100 PCIe", 756.5e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA H200", 989.5e12),
        ("NVIDIA H200 NVL", 835.5e12),
        ("NVIDIA GH200 480GB", 989.5e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA RTX A6000", 154.8e12),
        ("NVIDIA RTX 6000 Ada Generation", 364.2e12),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8e12),
        ("NVIDIA GeForce RTX 3090", 71e12),
        ("NVIDIA GeForce RTX 3090 Ti", 80e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 88.2e12),
        ("NVIDIA GeForce RTX 5090", 209.5e12),
        ("NVIDIA GB10", 125e12),
    ],
)
def test_known_devices(name, peak):
    assert peak_bf16_flops(name) == peak


@pytest.mark.parametrize(
    "name",
    [
        "Tesla T4",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "cpu",
        "",
    ],
)
def test_unknown_or_different_parts_have_no_peak(name):
    assert peak_bf16_flops(name) is None
