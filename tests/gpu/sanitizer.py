"""The smallest case of every Triton kernel of the package, forward and backward, in one process: what compute-sanitizer
runs.

As a script: python -m tests.gpu.sanitizer [kernel folders]; it names every kernel that was launched, and fails where a
case left one of its own out. On CUDA, or with TRITON_INTERPRET=1 on a CPU, which shows that cases and kernels still fit
each other.

Sizes are odd, so that every mask has something to mask; PYTORCH_NO_CUDA_MEMORY_CACHING=1 gives every tensor an
allocation of its own, whose ends the sanitizer knows.
"""

import ast
import importlib
import os
import sys
from collections import Counter
from pathlib import Path

import torch

from lightning_fastft.kernels.adamw_step.reference import SkipFlag, StepOptions
from lightning_fastft.kernels.adamw_step.table import TensorTable
from lightning_fastft.kernels.expert_gate.reference import GateForm, LowRankRows
from lightning_fastft.kernels.grouped_mm.reference import GatheredRows, RowAddend
from lightning_fastft.kernels.nf4_experts.reference import NF4Stack
from lightning_fastft.kernels.nf4_linear.reference import NF4Weight
from lightning_fastft.kernels.qk_rope.reference import Heads, Rope, RopeForm
from lightning_fastft.kernels.rms_norm.reference import NormForm

PACKAGE = Path(__file__).parents[2] / "lightning_fastft"
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
DTYPES = (torch.float32, torch.bfloat16)


def numbers(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE).to(dtype)


def whole(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def adamw_step(triton):
    for copy_dtype in (None, torch.bfloat16):
        # A chunk and a bit, and a tensor that is no multiple of anything.
        params = [numbers(5000), numbers(7)]
        averages = [[numbers(*param.shape).abs() for param in params] for _ in range(2)]
        copies = None if copy_dtype is None else [param.to(copy_dtype) for param in params]
        table = TensorTable(params, exp_avgs=averages[0], exp_avg_sqs=averages[1], copies=copies)
        for param in params:
            param.grad = torch.randn_like(param)
        flag = SkipFlag(
            found_inf=torch.zeros((), device=DEVICE), num_skipped=torch.zeros((), dtype=torch.float64, device=DEVICE)
        )
        triton.adamw_step(
            table, options=StepOptions(learning_rate=0.1, step=3), scale=torch.ones((), device=DEVICE), skip=flag
        )
        triton.grad_norm(table)
    # Averages in 8 bits: a chunk and a bit, the last block not full.
    param = numbers(5000)
    param.grad = torch.randn_like(param)
    stored = [[torch.zeros(5000, dtype=torch.uint8, device=DEVICE)] for _ in range(2)]
    absmaxs = [[torch.ones(20, device=DEVICE)] for _ in range(2)]
    table = TensorTable(
        [param], exp_avgs=stored[0], exp_avg_sqs=stored[1], exp_avg_absmaxs=absmaxs[0], exp_avg_sq_absmaxs=absmaxs[1]
    )
    triton.adamw_step(
        table, options=StepOptions(learning_rate=0.1, step=3), scale=torch.ones((), device=DEVICE), skip=flag
    )


def attention(triton):
    documents = triton.Documents(whole([0, 3, 70, 71]), whole([0] * 3 + [1] * 67 + [2]))
    for width, window in ((64, 5), (128, None)):
        q, k, v, d_out = (numbers(71, heads, width, dtype=torch.float16) for heads in (4, 2, 2, 4))
        options = {"scale": 0.1, "window": window}
        out, lse = triton.attend(q, k, v, documents, sink_H=numbers(4) if window else None, **options)
        triton.attend_backward(q, k, v, documents, out_THW=out, lse_HT=lse, d_out_THW=d_out, **options)


def block_diagonal(triton):
    out = torch.empty(8, 12, device=DEVICE)[:, :9]
    triton.write_block_diagonal(out, [numbers(5, 3), numbers(3, 6)])


def cross_entropy(triton):
    for dtype in DTYPES:
        targets = whole([3, -100, 12], torch.int64)
        for softcap, factor, counts in ((None, 0.5, True), (5.0, 0.5, False), (None, None, True)):
            triton.row_losses(
                numbers(3, 13, dtype=dtype),
                targets,
                scale=1.5,
                softcap=softcap,
                gradient_factor=factor,
                count_correct=counts,
                with_entropy=counts,
            )


def divergence(triton):
    from lightning_fastft.kernels.divergence.reference import KINDS, DivergenceForm

    for dtype in DTYPES:
        for kind in KINDS:
            for softcap, writes_gradient in ((None, True), (5.0, True), (None, False)):
                triton.row_divergences(
                    numbers(3, 13, dtype=dtype),
                    numbers(3, 13, dtype=dtype),
                    form=DivergenceForm(kind, 0.3, 1.5, softcap, 0.5, softcap),
                    writes_gradient=writes_gradient,
                )
        row_values = (numbers(3) for _ in range(3))
        triton.rest_rows(numbers(3, 13, dtype=dtype), *row_values, scale=1.5, softcap=5.0, writes_gradient=True)


def expert_gate(triton):
    for form in (
        GateForm(),
        GateForm(is_interleaved=True, activation="clamped"),
        GateForm(activation="gelu_tanh"),
        GateForm(activation="gelu"),
    ):
        for dtype in DTYPES:
            gate_up, d_act = numbers(5, 26, dtype=dtype), numbers(5, 13, dtype=dtype)
            triton.gate_forward(gate_up, form=form)
            triton.gate_backward(d_act, gate_up, form=form, weight_N=numbers(5), need_act=True)
            addend = LowRankRows(numbers(5, 3, dtype=dtype), numbers(3, 13, dtype=dtype))
            triton.gate_backward(d_act, gate_up, form=form, weight_N=numbers(5), addend=addend, need_act=True)
            triton.gate_backward(d_act, gate_up, form=form)
            triton.gate_forward_quantised(gate_up, form=form, round_scales_to_power_of_2=True)
            options = {"form": form, "factor_P": numbers(26), "round_scales_to_power_of_2": False}
            triton.gate_backward_quantised(d_act, gate_up, need_act=dtype is torch.float32, **options)


def expert_pack(triton):
    for dtype in DTYPES:
        triton.exchange_ends(numbers(5, 3, 7), out=torch.empty(7, 3, 5, dtype=dtype, device=DEVICE))


def expert_rows(triton):
    # Three tokens, two experts each; the last slot belongs to no expert.
    slots, places, ends = whole([4, 1, 0, 3, 2, 5]), whole([[2, 1], [4, 3], [0, 5]]), whole([2, 2, 5])
    for dtype in DTYPES:
        rows = triton.gather_rows(numbers(3, 13, dtype=dtype), slots, num_experts_per_token=2)
        triton.combine_rows(rows, places, ends)
        triton.combine_rows(rows, places, ends, weight_TK=numbers(3, 2))


def expert_sort(triton):
    for dtype in (torch.int64, torch.int32):
        # An id that names no expert among them.
        triton.sort_slots(whole([[0, 4], [2, 5], [4, 0]], dtype), num_experts=5)


def grouped_mm(triton):
    # Experts with rows, without, and a row behind the last of them.
    ends = whole([3, 3, 6])
    for dtype in DTYPES:
        rows, weights, d_rows = (
            numbers(7, 13, dtype=dtype),
            numbers(3, 13, 19, dtype=dtype),
            numbers(7, 19, dtype=dtype),
        )
        addend = RowAddend(
            bias_EO=numbers(3, 19, dtype=dtype),
            low_NR=numbers(7, 4, dtype=dtype),
            low_ERO=numbers(3, 4, 19, dtype=dtype),
        )
        gathered = GatheredRows(numbers(7, 13, dtype=dtype), torch.randperm(7).to(DEVICE), 1)
        for x_NI in (rows, gathered):
            for added in (RowAddend(), addend):
                triton.grouped_mm(x_NI, weights, ends, addend=added, out_NO=torch.empty_like(d_rows))
            triton.grouped_weight_grad(x_NI, d_rows, ends, dtype=torch.float32, row_weight_N=numbers(7))
            triton.grouped_weight_grad(x_NI, d_rows, ends, dtype=dtype)
        triton.grouped_mm(d_rows, weights.transpose(1, 2), ends, addend=RowAddend(), out_NO=torch.empty_like(rows))
        triton.add_to_rows(d_rows, ends, addend=addend, out_NO=torch.empty_like(d_rows))


def column_scale(triton):
    for dtype in DTYPES:
        x, addend, factor, out = numbers(5, 13, dtype=dtype), numbers(5, 13, dtype=dtype), numbers(13), numbers(2, 13)
        triton.scale_columns(x, factor, offset_N=factor, addend_TN=addend, out=addend)
        triton.scale_columns_backward(x, addend, factor, needs_totals=True, out=x)
        weight, a, b = (numbers(*size, dtype=dtype) for size in ((13, 5), (3, 5), (13, 3)))
        triton.row_factors(weight, a, b, factor, scale=0.5, out=out)


def host_gather(triton):
    for dtype in DTYPES:
        table = torch.randn(5, 13).to(dtype)
        triton.gather_rows(table if DEVICE == "cpu" else table.pin_memory(), whole([4, 0, 3, 3], torch.int64))


def low_rank_add(triton):
    for dtype in DTYPES:
        for factor in (numbers(3, 13, dtype=dtype), numbers(13, 3, dtype=dtype).T):
            base, low, residual = numbers(5, 13, dtype=dtype), numbers(5, 3, dtype=dtype), numbers(5, 13, dtype=dtype)
            triton.add_low_rank(base, low, factor)
            triton.add_low_rank(base, low, factor, residual_TN=residual, out=residual)


def nf4_parts(num_experts, num_blocks, *, is_nested=True):
    """Any bytes are weights: places in the tables, scales of the scales for every 256 blocks."""
    packed = torch.randint(0, 256, (num_experts, num_blocks * 32), dtype=torch.uint8, device=DEVICE)
    table = torch.linspace(-1, 1, 16, device=DEVICE)
    if not is_nested:
        return packed, numbers(num_experts, num_blocks), None, None, table, None
    places = torch.randint(0, 256, (num_experts, num_blocks), dtype=torch.uint8, device=DEVICE)
    num_groups = -(-num_blocks // 256)
    return (
        packed,
        places,
        numbers(num_experts, num_groups),
        numbers(num_experts),
        table,
        torch.linspace(-1, 1, 256, device=DEVICE),
    )


def nf4_experts(triton):
    for dtype in DTYPES:
        triton.dequantise_stack(NF4Stack(*nf4_parts(3, 5)), torch.empty(3, 5 * 64, dtype=dtype, device=DEVICE))


def nf4_linear(triton):
    for is_nested in (True, False):
        for dtype in DTYPES:
            parts = [nf4_parts(1, count, is_nested=is_nested) for count in (3, 10)]
            weights = [
                NF4Weight(*(None if part is None else part[0] for part in of_one[:4]), *of_one[4:]) for of_one in parts
            ]
            shapes = ((3, 64), (2, 5 * 64))
            triton.dequantise_many(weights, [torch.empty(shape, dtype=dtype, device=DEVICE) for shape in shapes])


def fp8_linear(triton):
    for dtype in DTYPES:
        for factor in (numbers(37), numbers(37).bfloat16(), None):
            triton.quantise_rows(
                numbers(5, 41, dtype=dtype)[:, 1:38], factor_I=factor, round_scales_to_power_of_2=factor is None
            )
    for is_nested in (True, False):
        for is_transposed in (False, True):
            parts = [nf4_parts(1, count, is_nested=is_nested) for count in (6, 10)]
            weights = [
                NF4Weight(*(None if part is None else part[0] for part in of_one[:4]), *of_one[4:]) for of_one in parts
            ]
            shapes = ((3, 128), (5, 128))
            values = [
                torch.empty(shape[::-1] if is_transposed else shape, dtype=torch.float8_e4m3fn, device=DEVICE)
                for shape in shapes
            ]
            scales = [torch.empty(shape[0], device=DEVICE) for shape in shapes]
            triton.nf4_row_scales(weights, scales)
            triton.quantise_nf4(weights, values, scales, is_transposed=is_transposed)
    rows = triton.quantise_rows(numbers(5, 37), factor_I=None, round_scales_to_power_of_2=True)
    shifts = triton.balance(rows.scale_T, rows.scale_T, torch.ones(7, device=DEVICE))
    for shift_T in (None, shifts[0]):
        turned = torch.empty(37, 16, dtype=torch.float8_e4m3fn, device=DEVICE)
        triton.transpose(rows.values_TI, shift_T=shift_T, out_IT=turned)


def qk_rope(triton):
    forms = (
        RopeForm(3, 1, 12), RopeForm(3, 1, 12, rotary_width=8, is_interleaved=True), RopeForm(2, 2, 10, has_norm=True),
        RopeForm(2, 1, 12, rotary_width=6, has_norm=True, weight_offset=1.0, is_weight_wide=True),
    )  # fmt: skip
    for form in forms:
        for dtype in DTYPES:
            qkv, d_qkv = (numbers(5, form.num_columns, dtype=dtype) for _ in range(2))
            cos, sin = (numbers(5, form.num_rotated, dtype=dtype) for _ in range(2))
            weights = [numbers(form.head_width, dtype=dtype) if form.has_norm else None for _ in range(2)]
            rope = Rope(cos, sin, *weights, form)
            triton.qk_rope_heads(qkv, rope)
            raw = qkv if form.has_norm else None
            heads = Heads(*d_qkv.unflatten(1, (-1, form.head_width)).split(form.head_counts, dim=1))
            shares = Heads(*(numbers(5, form.num_heads, form.head_width, dtype=dtype) for _ in range(3)))
            for d_heads in (heads, shares):
                triton.qk_rope_backward(d_heads, raw, rope, needs_weight=form.has_norm)
            triton.qk_rope_backward(heads, raw, rope, needs_weight=False)


def repeat_heads(triton):
    for dtype in DTYPES:
        triton.repeat_heads(numbers(5, 20, dtype=dtype)[:, 1:19].unflatten(1, (2, 9)), 6)


def rms_norm(triton):
    for form in (NormForm(), NormForm(weight_offset=1.0, is_weight_wide=True)):
        for dtype in DTYPES:
            x, d_y, addend = (numbers(5, 13, dtype=dtype) for _ in range(3))
            weight, rstd = numbers(13, dtype=dtype), numbers(5)
            triton.rms_norm_forward(x, weight, form=form)
            triton.rms_norm_backward(d_y, x, weight, form=form, addend_TD=addend, needs_weight=True, rstd_out=rstd)
            triton.rms_norm_backward(d_y, x, weight, form=form, needs_weight=False, out=d_y)


def chunk_gradients(triton):
    from tests.kernels.test_chunk_gradients import make_inputs, run

    for dtype in DTYPES:
        inputs, offsets = make_inputs((1, 2, 24, 40), dtype, lengths=(1, 67), device=DEVICE)
        run(triton.chunk_gradients, inputs, offsets)


def delta_inputs(triton):
    from tests.kernels.test_delta_inputs import FORMS, make, positions

    lengths = (3, 1, 41)
    for form in FORMS:
        rows, parameters, gradients = make(form, lengths, torch.float32, device=DEVICE)
        position = positions(lengths, device=DEVICE)
        triton.delta_inputs_forward(rows, parameters, position, form=form)
        triton.delta_inputs_backward(
            gradients, rows, parameters, position, form=form, needs_weights=True, out=torch.zeros_like(rows)
        )


def head_gate(triton):
    from tests.kernels.test_head_gate import FORMS, make

    for form in FORMS:
        d_y, x, rows, weight = make(form, 7, torch.float32, device=DEVICE)
        triton.head_gate_forward(x, rows, weight, form=form)
        triton.head_gate_backward(
            d_y, x, rows, weight, form=form, needs_weight=weight is not None, out=torch.zeros_like(rows)
        )


def state_scan(triton):
    from tests.kernels.test_state_scan import make_chunks, make_inputs

    lengths = (7, 1, 33)
    inputs = make_inputs(lengths, heads=2, width=16, groups=1, states=16, device=DEVICE)
    chunks = make_chunks(lengths, 16, device=DEVICE)
    triton.scan_forward(*inputs, chunks=chunks)
    triton.scan_backward(torch.randn_like(inputs[0]).contiguous(), *inputs, chunks=chunks)


# By folder: what launches every kernel in it, the function of this file that has its name.
CASES = {
    path.parent.name: globals().get(path.parent.name) for path in sorted((PACKAGE / "kernels").glob("*/triton.py"))
}


def kernels_of(path):
    """Return the names of the kernels of a file: functions under ``triton.jit`` that are given to ``launch``, or
    launched with a ``[grid]`` of their own, which no case counts.
    """
    tree = ast.parse(path.read_text())
    jitted = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for mark in node.decorator_list
        if "jit" in ast.unparse(mark)
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    launched = {ast.unparse(call.args[0]) for call in calls if ast.unparse(call.func) == "launch" and call.args}
    launched |= {ast.unparse(call.func.value) for call in calls if isinstance(call.func, ast.Subscript)}
    return sorted(jitted & launched)


def all_kernels():
    """Return the kernels of the package by file; a file without one is left out."""
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if "triton" in path.read_text()]
    found = {path: kernels_of(path) for path in files}
    return {path: names for path, names in found.items() if names}


def run_case(name):
    """Run the case of a folder and return the launches of each of its kernels."""
    module = importlib.import_module(f"lightning_fastft.kernels.{name}.triton")
    names = {id(getattr(module, kernel)): kernel for kernel in kernels_of(Path(module.__file__))}
    counts, launch = Counter(dict.fromkeys(names.values(), 0)), module.launch

    def count_and_launch(kernel, *arguments, **options):
        counts[names[id(kernel)]] += 1
        launch(kernel, *arguments, **options)

    module.launch = count_and_launch
    CASES[name](module)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return counts


def main(names):
    torch.manual_seed(0)
    missing = []
    with torch.no_grad():
        for name in names or CASES:
            for kernel, num_launches in run_case(name).items():
                print(f"kernels/{name}: {kernel} launched {num_launches} times", flush=True)
                missing += [] if num_launches else [kernel]
    if missing:
        sys.exit(f"no case launches {', '.join(missing)}")


if __name__ == "__main__":
    main(sys.argv[1:])
