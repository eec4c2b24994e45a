"""Time the kernel for gradients of queries, keys and decays of a gated delta rule, by its tiles.

    python -m benchmarks.chunk_gradients

A layer of Qwen3.5-9B: 8,192 tokens in ten documents, 16 heads of queries and keys and 32 of values of 128 columns, bf16.
Each line is the median of repeated launches between CUDA events (triton.testing.do_bench), wrappers included.
"""

from __future__ import annotations

import itertools
import sys

import torch

LENGTHS = (1500, 700, 64, 300, 1000, 2000, 500, 200, 900, 1028)
SHAPE = (16, 32, 128, 128)
# Keys of a block, bytes of a row of values in a block, warps, stages of the pipeline.
TILES = (64, 128), (64, 128, 256), (4, 8), (2, 3)


def main() -> int:
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    from lightning_fastft.kernels.chunk_gradients import triton
    from tests.kernels.test_chunk_gradients import make_inputs, run

    torch.manual_seed(0)
    inputs, offsets = make_inputs(SHAPE, torch.bfloat16, lengths=LENGTHS, device="cuda")
    for keys, value_bytes, warps, stages in itertools.product(*TILES):
        triton.BLOCK_KEYS, triton.BLOCK_VALUE_BYTES, triton.NUM_WARPS, triton.NUM_STAGES = (
            keys, value_bytes, warps, stages,
        )  # fmt: skip
        try:
            ms = do_bench(lambda: run(triton.chunk_gradients, inputs, offsets), return_mode="median")
            text = f"{ms * 1e3:.0f} us"
        except OutOfResources:
            text = "not enough shared memory"
        print(f"{keys} keys, {value_bytes} bytes of values, {warps} warps, {stages} stages: {text}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
