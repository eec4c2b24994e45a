"""Published rates of GPUs by name, to plan for other machines."""

from __future__ import annotations

import re
from typing import NamedTuple

from lightning_fastft.core.device_peaks import peak_bf16_flops
from lightning_fastft.core.errors import OptionError
from lightning_fastft.planner.step import Machine

# Shares of the published rates that a training step reaches, measured on an H200 (989.5 TFLOP/s, 4.8 TB/s and 64 GB/s
# published): 690 TFLOP/s of bf16 matrix products inside a step (665 if nothing else runs for 8 s, when power limits
# them), 4.3 TB/s, and 45.6 GB/s each way while both directions copy. They are assumed for all other GPUs.
SUSTAINED_SHARE = 690 / 989.5
MEMORY_SHARE = 4.3 / 4.8
COPY_SHARE = 45.6 / 64
_GIB = 2**30
# PCI Express x16, each way.
_PCIE_4, _PCIE_5 = 32e9, 64e9
# NVLink of the third, fourth and fifth generation, each way.
_NVLINK_3, _NVLINK_4, _NVLINK_5 = 300e9, 450e9, 900e9


class Gpu(NamedTuple):
    """Data sheet of a GPU.

    Args:
        name: Name that the driver reports, shortened.
        memory_bytes_per_s: Published bandwidth of device memory.
        memory_bytes: Size of device memory.
        link_bytes_per_s: Published bandwidth to the host, each way.
        is_unified: Whether host and device share memory.
        source: Page with the figures.
        is_measured: The shares above were measured on this GPU itself.
        nvlink_bytes_per_s: Published bandwidth to the other GPUs of a node over NVLink, each way; 0 without NVLink.
    """

    name: str
    memory_bytes_per_s: float
    memory_bytes: int
    link_bytes_per_s: float
    is_unified: bool
    source: str
    is_measured: bool = False
    nvlink_bytes_per_s: float = 0.0

    @property
    def bf16_flops_per_s(self) -> float:
        """Published rate of dense bf16 matrix products with fp32 sums."""
        peak = peak_bf16_flops(self.name)
        assert peak is not None, self.name
        return peak

    @property
    def sustained_flops_per_s(self) -> float:
        """Rate of dense bf16 matrix products over a whole step, limited by power."""
        return self.bf16_flops_per_s * SUSTAINED_SHARE

    @property
    def reached_bytes_per_s(self) -> float:
        """Memory bandwidth that a good kernel reaches."""
        return self.memory_bytes_per_s * MEMORY_SHARE

    @property
    def machine(self) -> Machine:
        """Copy rates for the planner."""
        rate = 0.0 if self.is_unified else self.link_bytes_per_s * COPY_SHARE
        return Machine(self.name, d2h_bytes_per_s=rate, h2d_bytes_per_s=rate, is_unified=self.is_unified)


GPUS = (
    Gpu("RTX 4090", 1008e9, 24 * _GIB, _PCIE_4, False, "NVIDIA Ada GPU Architecture, appendix A (white paper)"),
    Gpu(
        "RTX 5090", 1792e9, 32 * _GIB, _PCIE_5, False, "NVIDIA RTX Blackwell GPU Architecture, appendix A (white paper)"
    ),
    # Eight lanes of PCI Express.
    Gpu("RTX 4060", 272e9, 8 * _GIB, _PCIE_4 / 2, False, "nvidia.com/en-us/geforce/graphics-cards/40-series"),
    Gpu("RTX 4070", 504e9, 12 * _GIB, _PCIE_4, False, "NVIDIA Ada GPU Architecture, white paper"),
    Gpu("RTX 4080", 716.8e9, 16 * _GIB, _PCIE_4, False, "NVIDIA Ada GPU Architecture, white paper"),
    Gpu("DGX Spark (GB10)", 273e9, 119 * _GIB, 0.0, True, "docs.nvidia.com/dgx/dgx-spark/hardware.html"),
    Gpu(
        "A100 40GB",
        1555e9,
        40 * _GIB,
        _PCIE_4,
        False,
        "nvidia.com/en-us/data-center/a100 (SXM)",
        nvlink_bytes_per_s=_NVLINK_3,
    ),
    Gpu(
        "A100 80GB",
        2039e9,
        80 * _GIB,
        _PCIE_4,
        False,
        "nvidia.com/en-us/data-center/a100 (SXM)",
        nvlink_bytes_per_s=_NVLINK_3,
    ),
    Gpu("L40S", 864e9, 45 * _GIB, _PCIE_4, False, "nvidia.com/en-us/data-center/l40s"),
    Gpu(
        "H100",
        3350e9,
        79 * _GIB,
        _PCIE_5,
        False,
        "nvidia.com/en-us/data-center/h100 (SXM)",
        nvlink_bytes_per_s=_NVLINK_4,
    ),
    Gpu(
        "H200",
        4800e9,
        139 * _GIB,
        _PCIE_5,
        False,
        "nvidia.com/en-us/data-center/h200 (SXM), times the shares of them measured there",
        is_measured=True,
        nvlink_bytes_per_s=_NVLINK_4,
    ),
    Gpu(
        "B200",
        8000e9,
        179 * _GIB,
        _PCIE_5,
        False,
        "nvidia.com/en-us/data-center/dgx-b200",
        nvlink_bytes_per_s=_NVLINK_5,
    ),
)
# Words of the names of parts with other rates.
_OTHER_PARTS = frozenset({"ti", "super", "d", "laptop", "mobile", "max", "mig"})
# Words of a name that do not identify the GPU.
_NOISE = (
    "nvidia",
    "geforce",
    "tensor",
    "core",
    "gpu",
    "graphics",
    "sxm4",
    "sxm5",
    "sxm6",
    "sxm",
    "pcie",
    "hbm3e",
    "hbm3",
    "founders",
    "edition",
)


def find_gpu(name: str) -> Gpu:
    """Return the GPU with a name; case, maker, series and punctuation do not matter.

    Args:
        name: "4090", "rtx-4090" or "NVIDIA GeForce RTX 4090".

    Raises:
        OptionError: The name matches no GPU or several; the message lists all names.

    Example:
        >>> find_gpu("nvidia h200").name
        'H200'
    """
    wanted = _words(name)
    found = [gpu for gpu in GPUS if wanted and all(word in _words(gpu.name) for word in wanted)]
    # A driver's name has more words than the table: "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3".
    if not found and not _OTHER_PARTS & set(wanted):
        found = [gpu for gpu in GPUS if wanted and all(word in wanted for word in _words(gpu.name))]
    if len(found) == 1:
        return found[0]
    known = ", ".join(gpu.name for gpu in found or GPUS)
    reason = f"matches {len(found)} GPUs" if found else "is not a GPU with known rates"
    raise OptionError(f"{name!r} {reason}; name one of: {known}.")


def _words(name: str) -> list[str]:
    words = re.findall(r"[a-z]+\d+[a-z]*|\d+[a-z]*|[a-z]+", re.sub(r"(\d) +gi?b\b", r"\1gb", name.lower()))
    # "rtx4090" is "rtx 4090".
    split = [part for word in words for part in (("rtx", word[3:]) if re.fullmatch(r"rtx\d+", word) else (word,))]
    return [word for word in split if word not in _NOISE]
