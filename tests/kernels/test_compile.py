"""Every Triton kernel compiles for the GPUs it is meant for, on a machine without one: the interpreter accepts
what the compiler refuses.
"""

import json

import pytest

from tests.support.children import compile_kernels

pytest.importorskip("triton")

# Shared memory of a consumer card (compute capability 8.6) in bytes.
SMALLEST_SHARED_BYTES = 99 * 1024
# Capability, dtype of the logits, soft cap, gradient written, correct rows counted, entropy, rows aligned (a vocabulary that 16
# divides).
CASES = [
    (86, "fp16", True, True, True, True, False),
    (90, "bf16", False, True, False, False, True),
    (90, "bf16", False, True, False, True, True),
    (90, "bf16", True, False, True, False, True),
]

SCRIPT = """
import json, pathlib, re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lightning_fastft.kernels.cross_entropy import triton as cross_entropy

for capability, dtype, has_softcap, write_gradient, count_correct, with_entropy, is_aligned in json.loads(sys.argv[1]):
    constants = {
        "IGNORED": -100, "HAS_SOFTCAP": has_softcap, "WRITE_GRADIENT": write_gradient, "COUNT_CORRECT": count_correct,
        "WITH_ENTROPY": with_entropy,
        "DEPTH": cross_entropy.MAX_DEPTH, "LANES": cross_entropy.MAX_LANES,
    }
    signature = {
        "logits_ptr": "*" + dtype, "target_ptr": "*i64", "nll_ptr": "*fp32", "correct_ptr": "*i1", "entropy_ptr": "*fp32", "row_stride": "i32", "num_columns": "i32",
        "scale": "fp32", "softcap": "fp32", "gradient_factor": "fp32", **dict.fromkeys(constants, "constexpr"),
    }
    # Pointers, stride and number of columns; without that no wide access is chosen.
    attributes = {(place,): [["tt.divisibility", 16]] for place in (0, 1, 2, 5, 6)} if is_aligned else {}
    source = ASTSource(cross_entropy._row_loss_kernel, signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": cross_entropy.NUM_WARPS})
    with tempfile.TemporaryDirectory() as folder:
        cubin = pathlib.Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    num_stack_bytes = int(re.search(r"STACK:(\\d+)", usage)[1])
    num_wide = len(re.findall(r"(?:ld|st)\\.global\\S*\\.v4\\.b32", compiled.asm["ptx"]))
    print(compiled.metadata.shared, num_stack_bytes, num_wide, cross_entropy.MAX_DEPTH)
"""


def test_cross_entropy_compiles_and_fits_consumer_cards():
    out = compile_kernels(SCRIPT, json.dumps(CASES))
    found = [[int(number) for number in line.split()] for line in out.splitlines()]
    assert len(found) == len(CASES)
    for (*_, write_gradient, _, _, is_aligned), (shared_bytes, stack_bytes, num_wide, depth) in zip(CASES, found):
        assert shared_bytes <= SMALLEST_SHARED_BYTES
        assert stack_bytes == 0, "more registers than a thread has"
        # Each of the columns that meet in a lane is read, read again and written in words of 16 bytes.
        assert num_wide == (depth * (3 if write_gradient else 1) if is_aligned else 0)
