"""Every Triton kernel compiles for the GPUs it is meant for, on a machine without one: the interpreter accepts what the compiler refuses."""

import json

import pytest

from tests.kernels.children import compile_kernels

pytest.importorskip("triton")

# Shared memory of a consumer card (compute capability 8.6) in bytes.
SMALLEST_SHARED_BYTES = 99 * 1024
# Capability, dtype of the logits, soft cap, gradient written, correct rows counted.
CASES = [(86, "fp16", True, True, True), (90, "bf16", False, True, False), (90, "bf16", True, False, True)]

SCRIPT = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lightning_fastft.kernels.cross_entropy import triton as cross_entropy

from tests.kernels.children import compile_kernels

for capability, dtype, has_softcap, write_gradient, count_correct in json.loads(sys.argv[1]):
    constants = {
        "IGNORED": -100, "HAS_SOFTCAP": has_softcap, "WRITE_GRADIENT": write_gradient, "COUNT_CORRECT": count_correct,
        "BLOCK": cross_entropy.MAX_BLOCK,
    }
    signature = {
        "logits_ptr": "*" + dtype, "target_ptr": "*i64", "nll_ptr": "*fp32", "correct_ptr": "*i1", "row_stride": "i32", "num_columns": "i32",
        "scale": "fp32", "softcap": "fp32", "gradient_factor": "fp32", **dict.fromkeys(constants, "constexpr"),
    }
    source = ASTSource(cross_entropy._row_loss_kernel, signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": cross_entropy.NUM_WARPS})
    print(compiled.metadata.shared)
"""


def test_cross_entropy_compiles_and_fits_consumer_cards():
    out = compile_kernels(SCRIPT, json.dumps(CASES))
    shared_bytes = [int(line) for line in out.split()]
    assert len(shared_bytes) == len(CASES)
    assert max(shared_bytes) <= SMALLEST_SHARED_BYTES
