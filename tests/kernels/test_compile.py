"""Every Triton kernel compiles for the GPUs it is meant for, on a machine without one: the interpreter accepts
what the compiler refuses.
"""

import importlib
import json
import re
from pathlib import Path

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

COMPILE_SCRIPT = """
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
    out = compile_kernels(COMPILE_SCRIPT, json.dumps(CASES))
    found = [[int(number) for number in line.split()] for line in out.splitlines()]
    assert len(found) == len(CASES)
    for (*_, write_gradient, _, _, is_aligned), (shared_bytes, stack_bytes, num_wide, depth) in zip(CASES, found):
        assert shared_bytes <= SMALLEST_SHARED_BYTES
        assert stack_bytes == 0, "more registers than a thread has"
        # Each of the columns that meet in a lane is read, read again and written in words of 16 bytes.
        assert num_wide == (depth * (3 if write_gradient else 1) if is_aligned else 0)


# Compute capabilities of A100, RTX 30, RTX 40 and L40S, H100 and H200, B200, RTX 50, and their shared memory in KiB.
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
# fp8 begins with compute capability 8.9.
FIRST_CAPABILITY = {"fp8_linear": 89, "_gate_forward_quantised_kernel": 89, "_gate_backward_quantised_kernel": 89}
# What the scripts of some tests are given; the others take a lane, or nothing.
ARGUMENTS = {
    "test_compile": json.dumps(CASES[:1]),
    "test_fp8_linear": json.dumps([(89, "bf16", "bf16", True, True)]),
    "test_divergence": json.dumps([(86, "fp16", name, True, 0) for name in ("_divergence_kernel", "_rest_kernel")]),
}
ROW_SCALES = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lightning_fastft.kernels.fp8_linear import triton as fp8

constants = {"NUM_BLOCKS": 64, "GROUP": 256, "LARGEST": 448.0, "LEAST_PEAK": 1e-12}
constants |= {"ROWS": fp8.SCALE_ROWS, "CHUNK": fp8.SCALE_BLOCKS}
signature = {"weight": ("*u8", "*u8", *["*fp32"] * 4), "scale_ptr": "*fp32", "num_rows": "i32"}
source = ASTSource(fp8._row_scales_kernel, signature | dict.fromkeys(constants, "constexpr"), constexprs=constants)
triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
"""
CHUNK_GRADIENTS = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lightning_fastft.kernels.chunk_gradients import triton as chunk_gradients

kernel = chunk_gradients._chunk_gradients_kernel
constants = {"HEADS": 4, "GROUP": 2, "KEYS": 128, "VALUES": 128, "HAS_W": True}
constants |= {"BLOCK_C": chunk_gradients.CHUNK, "BLOCK_K": chunk_gradients.BLOCK_KEYS, "BLOCK_V": 64}
types = dict.fromkeys(("state_ptr", "d_state_ptr", "decay_ptr", "d_decay_ptr"), "*fp32")
types |= {"start_ptr": "*i64", "chunk_ptr": "*i32", "num_tokens": "i32", "scale": "fp32"}
signature = {name: types.get(name, "*bf16") for name in kernel.arg_names} | dict.fromkeys(constants, "constexpr")
options = {"num_warps": chunk_gradients.NUM_WARPS, "num_stages": chunk_gradients.NUM_STAGES}
triton.compile(ASTSource(kernel, signature, constexprs=constants), target=GPUTarget("cuda", 90, 32), options=options)
"""


def compile_scripts():
    """Yield each script that compiles kernels, with its arguments."""
    yield CHUNK_GRADIENTS, ()
    yield ROW_SCALES, ()
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        if "\nCOMPILE_SCRIPT = " not in path.read_text():
            continue
        module = importlib.import_module(f"tests.kernels.{path.stem}")
        yield module.COMPILE_SCRIPT, (ARGUMENTS.get(path.stem, "promises"),)


def known_kernels():
    """Return the room and name of each kernel that is launched."""
    folder = Path(importlib.import_module("lightning_fastft.kernels").__file__).parent
    return {
        (path.parent.name, name)
        for path in folder.glob("*/triton.py")
        for name in re.findall(r"^@triton\.jit.*\ndef (\w+_kernel)\(", path.read_text(), re.MULTILINE)
    }


@pytest.mark.fault
def test_every_kernel_compiles_for_every_gpu_and_fits_its_shared_memory(monkeypatch):
    """The form of each kernel that a script compiles first, for all GPUs."""
    import triton
    from triton.backends.compiler import GPUTarget

    compile_one, seen, failed = triton.compile, set(), []

    def compile_for_all(source, target, options):
        room, name = source.fn.fn.__module__.split(".")[-2], source.fn.fn.__name__
        if (room, name) not in seen:
            seen.add((room, name))
            for capability, num_kib in SHARED_KIB.items():
                if capability < FIRST_CAPABILITY.get(name, FIRST_CAPABILITY.get(room, 0)):
                    continue
                compiled = compile_one(source, target=GPUTarget("cuda", capability, 32), options=options)
                if compiled.metadata.shared > num_kib * 1024:
                    failed.append((room, name, capability, compiled.metadata.shared))
        return compile_one(source, target=target, options=options)

    monkeypatch.setattr(triton, "compile", compile_for_all)
    for script, arguments in compile_scripts():
        compile_kernels(script, *arguments)
    assert seen == known_kernels()
    assert not failed
