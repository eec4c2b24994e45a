"""Peak rates of devices: dense bf16 tensor-core operations per second, accumulated in fp32, by the name
that CUDA gives it.
"""

from __future__ import annotations

import re

# (words that the device name must all hold, dense bf16 operations per second). The first match counts, so longer
# entries come first. Vendors print figures with structured sparsity; these are without it (half of them).
PEAK_BF16_FLOPS: tuple[tuple[frozenset[str], float], ...] = tuple(
    (frozenset(words.split()), peak)
    for words, peak in (
        # HGX B200 / B300, GB200 data sheets: 4.5 and 5 PFLOPS with sparsity for each GPU.
        ("gb200", 2500e12),
        ("b200", 2250e12),
        ("b300", 2250e12),
        ("b100", 1750e12),
        # DGX Spark: 1 PFLOPS of sparse fp4; dense is half of it, and bf16 a quarter of that.
        ("gb10", 125e12),
        # H100, H200 and GH200 data sheets: 1979 (SXM), 1671 (NVL), 1513 (PCIe) TFLOPS with sparsity.
        ("h200 nvl", 835.5e12),
        ("h200", 989.5e12),
        ("gh200", 989.5e12),
        ("h100 nvl", 835.5e12),
        ("h100 pcie", 756.5e12),
        ("h100", 989.5e12),
        ("h800 pcie", 756.5e12),
        ("h800", 989.5e12),
        ("h20", 148e12),
        # A100 / A800, A40, A30, A10, A10G data sheets (dense column).
        ("a100", 312e12),
        ("a800", 312e12),
        ("a40", 149.7e12),
        ("a30", 165e12),
        ("a10g", 70e12),
        ("a10", 125e12),
        # L4, L40, L40S data sheets: 242, 362 and 733 TFLOPS with sparsity.
        ("l40s", 362e12),
        ("l40", 181e12),
        ("l4", 121e12),
        # Professional cards: RTX A6000, RTX 6000 Ada and RTX PRO 6000 Blackwell data sheets.
        ("a6000", 154.8e12),
        ("6000 ada", 364.2e12),
        ("pro 6000 blackwell", 503.8e12),
        # GeForce cards multiply bf16 at half rate when they accumulate in fp32: GA102, Ada and RTX Blackwell
        # architecture papers.
        ("rtx 3090 ti", 80e12),
        ("rtx 3090", 71e12),
        ("rtx 3080 ti", 68e12),
        ("rtx 3080", 59.5e12),
        ("rtx 4090 d", 147.1e12),
        ("rtx 4090", 165.2e12),
        ("rtx 4080 super", 104.4e12),
        ("rtx 4080", 97.5e12),
        ("rtx 4070 ti super", 88.2e12),
        ("rtx 4070 ti", 80.2e12),
        ("rtx 4070 super", 70.9e12),
        ("rtx 4070", 58.3e12),
        ("rtx 4060 ti", 44.1e12),
        ("rtx 4060", 30.2e12),
        ("rtx 5090 d", 209.5e12),
        ("rtx 5090", 209.5e12),
        ("rtx 5080", 112.6e12),
        ("rtx 5070 ti", 87.9e12),
        ("rtx 5070", 61.7e12),
    )
)
# Laptop parts and slices of a GPU carry the name of a larger one.
_DIFFERENT_PARTS = frozenset({"laptop", "mig", "mobile", "max"})


def peak_bf16_flops(device_name: str) -> float | None:
    """Return the dense bf16 operations per second of a device, or None where the name is not known.

    Example:
        >>> peak_bf16_flops("NVIDIA H100 80GB HBM3"), peak_bf16_flops("NVIDIA GeForce RTX 4090 Laptop GPU")
        (989500000000000.0, None)
    """
    words = frozenset(re.split(r"[^a-z0-9]+", device_name.lower()))
    if words & _DIFFERENT_PARTS:
        return None
    return next((peak for needed, peak in PEAK_BF16_FLOPS if needed <= words), None)
