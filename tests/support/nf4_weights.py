"""One linear weight in NF4 made dense."""

import torch

from lightning_fastft.kernels.nf4_linear.op import dequantise_many


def dequantise(weight, *, shape, dtype, out=None):
    out = torch.empty(shape, dtype=dtype, device=weight.packed_C.device) if out is None else out
    dequantise_many([weight], outs=[out])
    return out
