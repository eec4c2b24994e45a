"""Every Triton kernel compiles for the GPUs it is meant for, on a machine without one: the interpreter accepts
what the compiler refuses.

Public functions of each ``triton.py`` are called as training calls them; their launches compile and do not run.
"""

import importlib
import re
from pathlib import Path
from unittest import mock

import pytest
import torch

from lightning_fastft.kernels.adamw_step.reference import SkipFlag
from lightning_fastft.kernels.cross_entropy import op as cross_entropy
from lightning_fastft.kernels.delta_inputs.reference import DeltaForm, DeltaInputs, DeltaParameters
from lightning_fastft.kernels.divergence.reference import KINDS, DivergenceForm
from lightning_fastft.kernels.expert_gate.reference import ACTIVATIONS, GateForm
from lightning_fastft.kernels.fp8_linear.reference import FP8
from lightning_fastft.kernels.grouped_mm.reference import Fp8Scales, GatheredRows, RowAddend
from lightning_fastft.kernels.head_columns import HeadColumns
from lightning_fastft.kernels.head_gate.reference import HeadGateForm
from lightning_fastft.kernels.launch import LaunchRecorder
from lightning_fastft.kernels.logit_rows import Head
from lightning_fastft.kernels.nf4_experts.reference import NF4Stack
from lightning_fastft.kernels.nf4_linear.reference import NF4Weight
from lightning_fastft.kernels.qk_rope.reference import Heads, Rope, RopeForm
from lightning_fastft.kernels.rms_norm.reference import NormForm
from tests.kernels import test_adamw_8bit as eight_bit_cases
from tests.kernels import test_adamw_step as adamw_cases
from tests.kernels import test_chunk_gradients as chunk_cases
from tests.kernels import test_expert_gate as gate_cases
from tests.kernels import test_qk_rope as rope_cases
from tests.kernels import test_rms_norm as norm_cases
from tests.kernels import test_state_scan as scan_cases
from tests.support.children import thinned
from tests.support.compiling import SHARED_KIB, compiled_for, skip_before_triton, stack_bytes
from tests.support.kernel_harness import load_with_fault

pytest.importorskip("triton")
pytestmark = [pytest.mark.covering, pytest.mark.slow(2)]

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
KERNELS = Path(importlib.import_module("lightning_fastft.kernels").__file__).parent
# Compute capability and dtype. Every run takes each GPU once in each test, the lane of faults all combinations.
GPUS = pytest.mark.parametrize(
    ("capability", "dtype"), [(80, FP16), (86, FP32), (89, FP16), (90, BF16), (100, BF16), (120, BF16)]
)
ALIGNMENTS = pytest.mark.parametrize(
    ("is_aligned", "has_more"), thinned((False, True), (False, True), keep=lambda one, other: one == other)
)


def module_of(folder):
    return importlib.import_module(f"lightning_fastft.kernels.{folder}.triton")


def kernel_names(module):
    return set(re.findall(r"^def (\w+_kernel)\(", Path(module.__file__).read_text(), re.MULTILINE))


def compile_launches(module, capability, launch):
    """Return the compiled kernels of what a function launches, which is every kernel of a module."""
    with compiled_for(capability) as compiled:
        launch()
    assert compiled.keys() == kernel_names(module)
    return [kernel for kernels in compiled.values() for kernel in kernels]


def test_every_kernel_is_compiled_here():
    folders = {path.parent.name for path in KERNELS.glob("*/triton.py")}
    missing = {f"test_{folder}" for folder in folders} - set(globals())
    assert missing == set(), "write these tests in this file"


def capabilities_of(test):
    """Return the compute capabilities for which a test compiles in every run; each case compiles every kernel."""
    ((_, cases),) = [m.args for m in test.pytestmark if m.name == "parametrize" and "capability" in m.args[0]]
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    params = [row if hasattr(row, "marks") else pytest.param(*row) for row in rows]
    return {param.values[0] for param in params if not param.marks}


# Tests of kernels that the test of their folder leaves out, and tests of casts to e4m3.
PARTS, E4M3 = ("8bit_adamw_step", "quantised_expert_gate"), ("fp8_linear", "quantised_expert_gate")


@pytest.mark.parametrize("name", [*sorted(path.parent.name for path in KERNELS.glob("*/triton.py")), *PARTS])
def test_every_kernel_is_compiled_for_every_gpu(name):
    tests = [test for title, test in globals().items() if title in (f"test_{name}", f"test_small_{name}")]
    found = set().union(*map(capabilities_of, tests))
    assert found == set(SHARED_KIB) - ({80, 86} if name in E4M3 else set())


@GPUS
@ALIGNMENTS
def test_adamw_step(capability, dtype, is_aligned, has_more):
    compile_adamw_step(capability, dtype, is_8bit=False, is_aligned=is_aligned, has_more=has_more)


@GPUS
@ALIGNMENTS
def test_8bit_adamw_step(capability, dtype, is_aligned, has_more):
    compile_adamw_step(capability, dtype, is_8bit=True, is_aligned=is_aligned, has_more=has_more)


def compile_adamw_step(capability, dtype, *, is_8bit, is_aligned, has_more):
    module, cases = module_of("adamw_step"), eight_bit_cases if is_8bit else adamw_cases
    combinations = [each for each in cases.COMBINATIONS if each[1] is dtype]
    table = cases.make_table(
        cases.make_rows(combinations, sizes=(64,) * len(combinations), missing=(), offset=not is_aligned)
    )
    options, number = cases.OPTIONS, torch.ones(())
    if has_more:
        options = options._replace(learning_rate=number, rounding_seed=1)

    def launch():
        skip = SkipFlag(number, number.double()) if has_more else None
        module.adamw_step(table, options=options, scale=number if has_more else None, skip=skip)
        module.grad_norm(table)

    with torch.no_grad(), compiled_for(capability) as compiled:
        launch()
    other = "_adamw_kernel" if is_8bit else "_adamw_8bit_kernel"
    assert compiled.keys() == kernel_names(module) - {other}
    # Vectors of 16 bytes where the host has seen that every address takes them, and nowhere else.
    for kernel in (*compiled["_adamw_8bit_kernel"], *compiled["_adamw_kernel"], *compiled["_sum_squares_kernel"]):
        loads, stores = (
            re.search(rf"{word}[.]global[.]v{'' if is_8bit else 4}", kernel.asm["ptx"]) for word in ("ld", "st")
        )
        assert bool(loads) == is_aligned
        assert bool(stores) == (is_aligned and "partial" not in kernel.asm["ttir"])


@GPUS
def test_block_diagonal(capability, dtype):
    module = module_of("block_diagonal")
    blocks = [torch.empty(rows, 32, dtype=dtype) for rows in (64, 2048)]
    out = torch.empty(2112, 64, dtype=dtype)
    compile_launches(module, capability, lambda: module.write_block_diagonal(out, blocks))


@GPUS
def test_chunk_gradients(capability, dtype):
    module = module_of("chunk_gradients")
    inputs, offsets = chunk_cases.make_inputs((4, 8, 128, 128), dtype)
    compile_launches(module, capability, lambda: chunk_cases.run(module.chunk_gradients, inputs, offsets))


# With a gradient, the number of correct rows, or entropy.
LOSSES = [(True, False, False), (False, False, False), (False, True, False), (True, False, True), (False, False, True)]


def test_losses_are_those_that_operations_launch():
    head = Head(torch.empty(64, 16, dtype=BF16, device="meta"), torch.empty(4096, 16, dtype=BF16, device="meta"))
    trained = head._replace(hidden_TD=head.hidden_TD.detach().requires_grad_())
    rows = {"row_R": None, "target_R": torch.empty(64, dtype=torch.int64, device="meta"), "num_rows": 64}
    with LaunchRecorder() as recorder:
        cross_entropy.token_statistics(head, **rows)
        for given in (head, trained):
            cross_entropy.labelled_cross_entropy(given, **rows, num_items=1.0)
            cross_entropy.labelled_log_probs(given, **rows)
            cross_entropy.labelled_log_probs(given, **rows, with_entropy=True)
    names = ("WRITE_GRADIENT", "COUNT_CORRECT", "WITH_ENTROPY")
    assert {tuple(launch.options[name] for name in names) for launch in recorder.launches.values()} == set(LOSSES)


# Logits of float32 take the reference.
@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        *[(80, FP16), (86, BF16), (89, FP16), (90, BF16), (100, BF16), (120, BF16)],
        pytest.param(87, BF16, marks=pytest.mark.fault),
    ],
)
@pytest.mark.parametrize("num_columns", [152_063, 152_064])
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize(("has_gradient", "count_correct", "with_entropy"), LOSSES)
def test_cross_entropy(capability, dtype, num_columns, softcap, has_gradient, count_correct, with_entropy):
    module = module_of("cross_entropy")
    logits, target = torch.empty(2, num_columns, dtype=dtype), torch.empty(2, dtype=torch.int64)
    options = {"softcap": softcap, "gradient_factor": 1.0 if has_gradient else None, "count_correct": count_correct}
    options |= {"scale": 0.5, "with_entropy": with_entropy}
    with mock.patch.object(module, "capability_of", return_value=divmod(capability, 10)):
        (kernel,) = compile_launches(module, capability, lambda: module.row_losses(logits, target, **options))
    # Aligned columns that meet in a lane are read, read again and written in words of 16 bytes.
    num_wide = len(re.findall(r"(?:ld|st)\.global\S*\.v4\.b32", kernel.asm["ptx"]))
    num_passes = 3 if has_gradient else 1
    assert num_wide == (module.MAX_DEPTH * num_passes if num_columns % 16 == 0 else 0)
    num_spilled = stack_bytes(kernel)
    if num_spilled and softcap is not None:
        skip_before_triton((3, 9), f"a thread spills {num_spilled} bytes")
    assert num_spilled == 0, "more registers than a thread has"


@pytest.mark.parametrize(
    "form", [DeltaForm(16, 32, 128, 128, True), pytest.param(DeltaForm(16, 32, 128, 128), marks=pytest.mark.fault)]
)
@pytest.mark.parametrize(
    ("capability", "dtype"),
    [(90, BF16)]
    + [pytest.param(gpu, FP16, marks=pytest.mark.fault) for gpu in (80, 86, 89)]
    + [pytest.param(gpu, BF16, marks=pytest.mark.fault) for gpu in (100, 120)],
)
def test_delta_inputs(capability, dtype, form):
    compile_delta_inputs(capability, dtype, form)


@pytest.mark.parametrize(("capability", "dtype"), [(80, FP16), (86, FP16), (89, FP16), (100, BF16), (120, BF16)])
def test_small_delta_inputs(capability, dtype):
    compile_delta_inputs(capability, dtype, DeltaForm(16, 32, 16, 16))


def compile_delta_inputs(capability, dtype, form):
    module = module_of("delta_inputs")

    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    rows = empty(64, form.num_columns)
    parameters = DeltaParameters(empty(form.num_channels, 4), *[empty(32, dtype=FP32)] * 2)
    position = empty(64, dtype=torch.int64)
    heads = [empty(64, 16, form.key_width), empty(64, 16, form.key_width), empty(64, 32, form.value_width)]
    gradients = DeltaInputs(*heads, *[empty(64, 32, dtype=FP32)] * 2)

    def launch():
        module.delta_inputs_forward(rows, parameters, position, form=form)
        options = {"form": form, "needs_weights": True, "out": empty(64, form.num_columns)}
        module.delta_inputs_backward(gradients, rows, parameters, position, **options)

    compile_launches(module, capability, launch)


@GPUS
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_divergence(capability, dtype, kind, softcap):
    module = module_of("divergence")
    logits, row = torch.empty(2, 152_064, dtype=dtype), torch.empty(2)
    form = DivergenceForm(kind, beta=0.5, scale=0.5, softcap=softcap, teacher_scale=0.5, teacher_softcap=softcap)

    def launch():
        module.row_divergences(logits, logits, form=form, writes_gradient=True)
        module.rest_rows(logits, row, row, row, scale=0.5, softcap=softcap, writes_gradient=True)

    # Two values at most, with which one of the kernels stays at 128 registers.
    assert max(map(stack_bytes, compile_launches(module, capability, launch))) <= 8, "more registers than a thread has"


@GPUS
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("num_ranks", [None, 16, 64])
def test_expert_gate(capability, dtype, activation, is_interleaved, num_ranks):
    module, form = module_of("expert_gate"), GateForm(is_interleaved, activation)
    d_act, gate_up, weight = gate_cases.make_inputs(64, 2048, dtype, form)
    addend = gate_cases.make_addend(64, 2048, num_ranks, dtype)

    def launch():
        end_E = torch.tensor([64], dtype=torch.int32) if is_interleaved else None
        module.gate_forward(gate_up, form=form, end_E=end_E)
        weights = None if num_ranks == 16 else weight
        module.gate_backward(d_act, gate_up, form=form, weight_N=weights, addend=addend, need_act=True)

    with compiled_for(capability) as compiled:
        launch()
    assert compiled.keys() == {"_gate_forward_kernel", "_gate_backward_kernel"}


# GPUs that have e4m3.
FP8_GPUS = pytest.mark.parametrize(
    ("capability", "dtype"),
    [(89, FP16), (90, BF16), (100, FP32), (120, BF16)],
)


def check_casts(capability, kernels):
    """Check that kernels cast fp32 to e4m3 in one instruction of the hardware, rounded once."""
    if capability == 89:
        skip_before_triton((3, 9), "casts to fp8 truncate to fp16 first on compute capability 8.9")
    assert all("cvt.rn.satfinite.e4m3x2.f32" in kernel.asm["ptx"] for kernel in kernels)


@FP8_GPUS
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("num_columns", [2048, 12_288])
def test_quantised_expert_gate(capability, dtype, activation, is_interleaved, num_columns):
    module, form = module_of("expert_gate"), GateForm(is_interleaved, activation)
    d_act, gate_up, _ = gate_cases.make_inputs(64, num_columns, dtype, form)
    factor, options = torch.empty(2 * num_columns), {"form": form, "round_scales_to_power_of_2": True}

    def launch():
        module.gate_forward_quantised(gate_up, **options)
        for need_act in (False, True):
            module.gate_backward_quantised(d_act, gate_up, factor_P=factor, need_act=need_act, **options)

    with compiled_for(capability) as compiled:
        launch()
    assert compiled.keys() == kernel_names(module) - {"_gate_forward_kernel", "_gate_backward_kernel"}
    check_casts(capability, [kernel for kernels in compiled.values() for kernel in kernels])


@FP8_GPUS
@pytest.mark.parametrize("num_columns", [13, 128, 5120])
@pytest.mark.parametrize("rounds", [False, True])
def test_quantised_rms_norm(capability, dtype, num_columns, rounds):
    module, form = module_of("rms_norm"), NormForm()
    x, weight, *_ = norm_cases.make_inputs(64, num_columns, dtype, form)
    with compiled_for(capability) as compiled:
        module.rms_norm_quantised(x, weight, form=form, round_scales_to_power_of_2=rounds)
    assert compiled.keys() == {"_rms_norm_forward_kernel"}


@FP8_GPUS
@pytest.mark.parametrize("num_columns", [2048, 34_816])
@pytest.mark.parametrize("is_set", [False, True])
def test_fp8_linear(capability, dtype, num_columns, is_set):
    module = module_of("fp8_linear")
    scale, factor = torch.empty(64), torch.empty(num_columns)
    nested = [torch.empty(-(-num_columns // 256)), torch.empty(()), torch.empty(16), torch.empty(256)]
    scales = torch.empty(num_columns, dtype=torch.uint8 if is_set else FP32)
    weight = NF4Weight(torch.empty(64 * num_columns // 2, dtype=torch.uint8), scales, *nested)
    values, turned = (torch.empty(size, dtype=module.FP8) for size in ((64, num_columns), (num_columns, 64)))

    def launch():
        x, given = torch.empty(64, num_columns, dtype=dtype), factor if is_set else None
        module.quantise_rows(x, factor_I=given, round_scales_to_power_of_2=is_set)
        module.nf4_row_scales([weight], [scale])
        module.quantise_nf4([weight], [turned if is_set else values], [scale], is_transposed=is_set)
        module.balance(scale, scale, factor)
        module.transpose(values, shift_T=scale if is_set else None, out_IT=turned)

    with compiled_for(capability) as compiled:
        launch()
    assert compiled.keys() == kernel_names(module)
    quantising = [*compiled["_quantise_rows_kernel"], *compiled["_quantise_nf4_kernel"]]
    for kernel in quantising:
        assert re.search(r"st\.global\.v[24]\.b32", kernel.asm["ptx"])
        assert "local" not in kernel.asm["ptx"], "registers are spilled"
    # The scales of blocks are a product and a sum, each rounded.
    assert "fma.rn.f32" not in quantising[-1].asm["ptx"]
    check_casts(capability, quantising)


@GPUS
@pytest.mark.parametrize("out_dtype", [FP32, BF16])
def test_expert_pack(capability, dtype, out_dtype):
    module = module_of("expert_pack")
    source, out = torch.empty(512, 4, 512, dtype=dtype), torch.empty(512, 4, 512, dtype=out_dtype)
    (kernel,) = compile_launches(module, capability, lambda: module.exchange_ends(source, out=out))
    # Four programs or more of a consumer card's 99 KiB; both sides in 8 bytes or more at once.
    assert 0 < kernel.metadata.shared <= 24 * 1024
    assert "ld.global.v" in kernel.asm["ptx"]
    assert "st.global.v" in kernel.asm["ptx"]


@GPUS
@pytest.mark.parametrize("num_choices", [1, 6, 8])
@pytest.mark.parametrize("has_weight", [False, True])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_expert_rows(capability, dtype, num_choices, has_weight, index):
    module = module_of("expert_rows")
    rows, end_E = torch.empty(64, 2048, dtype=dtype), torch.tensor([7, 64 * num_choices], dtype=torch.int32)
    slots, places = torch.empty(64 * num_choices, dtype=index), torch.empty(64, num_choices, dtype=index)
    weight = torch.empty(64, num_choices) if has_weight else None

    def launch():
        module.gather_rows(rows, slots, num_experts_per_token=num_choices, end_E=end_E if has_weight else None)
        module.combine_rows(torch.empty(64 * num_choices, 2048, dtype=dtype), places, end_E, weight_TK=weight)

    # Products and sums are rounded one by one, as PyTorch rounds them.
    assert not any("fma" in kernel.asm["ptx"] for kernel in compile_launches(module, capability, launch))


@GPUS
@pytest.mark.parametrize(("num_choices", "num_experts"), [(1, 1), (6, 64), (8, 4096)])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_expert_sort(capability, dtype, num_choices, num_experts, index):
    module, experts = module_of("expert_sort"), torch.empty(8192, num_choices, dtype=index)
    compile_launches(module, capability, lambda: module.sort_slots(experts, num_experts=num_experts))


@GPUS
@pytest.mark.parametrize("num_rows", [64 * 128, 512 * 128])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(2048, 1536), (2048, 16), (2048, 64), (64, 2048), (16, 2048)])
@pytest.mark.parametrize(("rank", "is_transposed"), [(100, False), (16, True), (0, True)])
def test_grouped_mm(capability, dtype, num_rows, num_inputs, num_outputs, rank, is_transposed):
    module = module_of("grouped_mm")

    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    end_E, slots = empty(128, dtype=torch.int32), empty(num_rows, dtype=torch.int64)
    shape = (128, num_outputs, num_inputs) if is_transposed else (128, num_inputs, num_outputs)
    weight = empty(*shape).mT if is_transposed else empty(*shape)
    addend = RowAddend()
    if rank:
        addend = RowAddend(empty(128, num_outputs), empty(num_rows, rank), empty(128, rank, num_outputs), 2.0)
    # With rows that are found by their slots, which takes more registers.
    x, d = (GatheredRows(empty(num_rows // 8, columns), slots, 8) for columns in (num_inputs, num_outputs))
    weights = empty(num_rows, dtype=FP32) if rank else None

    def launch():
        out = empty(num_rows, num_outputs)
        module.grouped_mm(x, weight, end_E, addend=addend, out_NO=out)
        module.add_to_rows(out, end_E, addend=addend if rank else RowAddend(empty(128, num_outputs)), out_NO=out)
        module.grouped_weight_grad(x, d, end_E, dtype=FP32, row_weight_N=weights)

    shared_bytes = SHARED_KIB[capability] * 1024
    with mock.patch.object(module, "_shared_bytes", return_value=shared_bytes), compiled_for(capability) as compiled:
        launch()
    assert compiled.keys() == kernel_names(module)
    for name, (kernel,) in compiled.items():
        # Only what fp32 loses is kept, and no compiler may have taken that for nothing.
        is_compensated = re.search("sub[.](rn[.])?f32", kernel.asm["ptx"]) is not None
        assert is_compensated == (dtype is FP32 and name != "_add_to_rows_kernel"), name


@pytest.mark.parametrize("capability", [89, 90, 100, 120])
@pytest.mark.parametrize("rows_per_expert", [64, 512])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(2048, 1536), (768, 2048), (2880, 5760), (16, 16)])
@pytest.mark.parametrize("rank", [0, 16])
def test_grouped_mm_fp8(capability, rows_per_expert, num_inputs, num_outputs, rank):
    module, num_rows = module_of("grouped_mm"), 128 * rows_per_expert

    def empty(*shape, dtype=BF16):
        return torch.empty(shape, dtype=dtype, device="meta")

    rows = GatheredRows(empty(num_rows // 8, num_inputs, dtype=FP8), empty(num_rows, dtype=torch.int64), 8)
    weight = empty(128, num_outputs, num_inputs, dtype=FP8)
    scales = Fp8Scales(empty(num_rows // 8, dtype=FP32), empty(128, dtype=FP32))
    addend = RowAddend()
    if rank:
        addend = RowAddend(empty(128, num_outputs), empty(num_rows, rank), empty(128, rank, num_outputs), 2.0)
    shared_bytes = SHARED_KIB[capability] * 1024
    with mock.patch.object(module, "_shared_bytes", return_value=shared_bytes), compiled_for(capability) as compiled:
        module.grouped_mm(
            rows,
            weight.mT,
            empty(128, dtype=torch.int32),
            addend=addend,
            out_NO=empty(num_rows, num_outputs),
            scales=scales,
        )
    (kernel,) = compiled["_grouped_mm_kernel"]
    assert capability == 89 or stack_bytes(kernel) == 0, "more registers than a thread has"
    # Sums of tensor cores, not of numbers that were widened first.
    instruction = {89: "mma.sync.aligned.m16n8k32", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync.aligned"}
    assert re.search(f"{instruction[capability]}.*(e4m3|f8f6f4)", kernel.asm["ptx"])


@GPUS
@pytest.mark.parametrize(
    "form",
    [
        HeadGateForm(HeadColumns(256, 256, 16, 1, 512)),
        HeadGateForm(HeadColumns(8192, 128, 32, 2, 256), "silu", has_norm=True),
    ],
)
def test_head_gate(capability, dtype, form):
    module, columns = module_of("head_gate"), form.columns
    x, rows = torch.empty(64, columns.num_heads, columns.width, dtype=dtype), torch.empty(64, columns.end, dtype=dtype)
    weight = torch.empty(columns.width, dtype=dtype) if form.has_norm else None

    def launch():
        y = module.head_gate_forward(x, rows, weight, form=form)
        module.head_gate_backward(y, x, rows, weight, form=form, needs_weight=form.has_norm, out=torch.empty_like(rows))

    compile_launches(module, capability, launch)


@GPUS
def test_column_scale(capability, dtype):
    module = module_of("column_scale")
    x, addend = (torch.empty(64, 2048, dtype=dtype) for _ in range(2))
    weight, a, b = (
        torch.empty(2048, 4096, dtype=dtype),
        torch.empty(16, 4096, dtype=dtype),
        torch.empty(2048, 16, dtype=dtype),
    )
    factor, out = torch.empty(2048), torch.empty(2, 2048)

    def launch():
        module.scale_columns(x, factor, offset_N=factor, addend_TN=addend)
        module.scale_columns_backward(x, addend, factor, needs_totals=True)
        module.row_factors(weight, a, b, factor, scale=1.0, out=out)

    kernels = compile_launches(module, capability, launch)
    # Weight and A are read in words of 16 bytes, ahead of the products.
    assert any(re.search(r"cp\.async\.cg\.shared\.global[^;]*0x10", kernel.asm["ptx"]) for kernel in kernels)


@GPUS
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_host_gather(capability, dtype, index):
    module = module_of("host_gather")
    weight, tokens = torch.empty(100, 4096, dtype=dtype), torch.empty(64, dtype=index)
    compile_launches(module, capability, lambda: module.gather_rows(weight, tokens))


@GPUS
@pytest.mark.parametrize(("num_ranks", "place"), [(32, "residual"), (16, "base"), (16, "new")])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_low_rank_add(capability, dtype, num_ranks, place, is_transposed):
    compile_low_rank_add(module_of("low_rank_add"), capability, dtype, num_ranks, place, is_transposed)


def compile_low_rank_add(module, capability, dtype, num_ranks, place, is_transposed):
    base, low, residual = (torch.empty(64, columns, dtype=dtype) for columns in (2048, num_ranks, 2048))
    factor = torch.empty(2048, num_ranks, dtype=dtype).T if is_transposed else torch.empty(num_ranks, 2048, dtype=dtype)
    options = {"residual_TN": residual} if place == "residual" else {}
    if place != "new":
        options["out"] = base if place == "base" else residual
    with mock.patch.object(module, "TRANSPOSED", is_transposed):
        (kernel,) = compile_launches(module, capability, lambda: module.add_low_rank(base, low, factor, **options))
    between = kernel.asm["ttir"].rpartition("tt.load")[2].partition("tt.store")[0]
    assert ("barrier" in between) is (place != "new"), "between the last read and the write: " + between


@pytest.mark.fault
def test_a_lost_barrier_is_seen(tmp_path):
    faulty = load_with_fault(module_of("low_rank_add"), "{tl.debug_barrier() => pass}", tmp_path)
    with pytest.raises(AssertionError, match="between the last read and the write"):
        compile_low_rank_add(faulty, 90, BF16, 16, "base", False)


def assert_reads_nf4(kernel, num_wide):
    """A fused product and sum rounds once, bitsandbytes twice; values are written in words of 16 bytes."""
    assert "fma.rn.f32" not in kernel.asm["ptx"]
    assert kernel.asm["ptx"].count("st.global.v4.b32") >= num_wide


@GPUS
def test_nf4_experts(capability, dtype):
    module = module_of("nf4_experts")
    parts = [torch.empty(2, 256 * size, dtype=torch.uint8) for size in (32, 1)]
    stack = NF4Stack(*parts, torch.empty(2, 1), torch.empty(2), torch.empty(16), torch.empty(256))
    out = torch.empty(2, 256 * 64, dtype=dtype)
    (kernel,) = compile_launches(module, capability, lambda: module.dequantise_stack(stack, out))
    assert_reads_nf4(kernel, 1)


@GPUS
@pytest.mark.parametrize(("num_weights", "is_nested"), [(1, True), (2, False), (3, True), (4, True)])
def test_nf4_linear(capability, dtype, num_weights, is_nested):
    module, weights, outs = module_of("nf4_linear"), [], []
    for num_columns in (2048, 2880, 5120, 4096)[:num_weights]:
        packed = torch.empty(64 * num_columns // 2, dtype=torch.uint8)
        scales = torch.empty(num_columns, dtype=torch.uint8 if is_nested else FP32)
        nested = [torch.empty(-(-num_columns // 256)), torch.empty(()), torch.empty(16), torch.empty(256)]
        weights.append(NF4Weight(packed, scales, *nested))
        outs.append(torch.empty(64, num_columns, dtype=dtype))
    (kernel,) = compile_launches(module, capability, lambda: module.dequantise_many(weights, outs))
    # Four words a thread and weight.
    assert_reads_nf4(kernel, 4 * num_weights)
    assert kernel.metadata.shared == 0 or dtype is FP32, "values move between threads"


@GPUS
@pytest.mark.parametrize(
    "form",
    [
        RopeForm(32, 8, 128, has_norm=True),
        RopeForm(16, 4, 256, rotary_width=64, has_norm=True, is_weight_wide=True, has_gate=True),
        RopeForm(3, 1, 96, rotary_width=72, has_norm=True, is_interleaved=True),
        # Other widths, more heads, and other combinations.
        *(
            pytest.param(form, marks=pytest.mark.fault)
            for form in (
                RopeForm(20, 4, 128, is_interleaved=True, has_norm=True, is_weight_wide=True),
                RopeForm(96, 8, 128, rotary_width=64, has_norm=True),
            )
        ),
    ],
)
@pytest.mark.parametrize("has_shares", [False, True])
def test_qk_rope(capability, dtype, form, has_shares):
    compile_qk_rope(capability, dtype, form, has_shares)


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [(90, BF16)]
    + [
        pytest.param(*gpu, marks=pytest.mark.fault)
        for gpu in ((80, FP16), (86, FP32), (89, FP16), (100, BF16), (120, BF16))
    ],
)
@pytest.mark.parametrize(
    "form",
    [
        RopeForm(32, 2, 128, rotary_width=64, is_interleaved=True),
        *(pytest.param(form, marks=pytest.mark.fault) for form in (RopeForm(14, 2, 80), RopeForm(14, 2, 192))),
    ],
)
@pytest.mark.parametrize("has_shares", [False, True])
def test_qk_rope_without_norms(capability, dtype, form, has_shares):
    compile_qk_rope(capability, dtype, form, has_shares)


def compile_qk_rope(capability, dtype, form, has_shares):
    module = module_of("qk_rope")
    _, _, *others = rope_cases.make_inputs(64, form._replace(has_gate=False), dtype)
    raw, rope = torch.empty(64, form.num_columns, dtype=dtype), Rope(*others, form)
    counts = (form.num_heads,) * 3 if has_shares else form.head_counts
    heads = Heads(*(torch.empty(64, count, form.head_width, dtype=dtype) for count in counts))

    def launch():
        module.qk_rope_heads(raw, rope)
        out = torch.empty_like(raw) if form.has_gate else None
        module.qk_rope_backward(heads, raw, rope, needs_weight=form.has_norm, out=out)

    with compiled_for(capability) as compiled:
        launch()
    assert compiled.keys() == kernel_names(module) - (set() if form.has_norm else {"_add_partials_kernel"})


# Chosen on Hopper only: for other GPUs every run compiles smaller tiles, the lane of faults these.
@pytest.mark.parametrize("capability", [90, *(pytest.param(gpu, marks=pytest.mark.fault) for gpu in (80, 86, 89, 100))])
@pytest.mark.parametrize(("width", "window"), [(64, 128), (128, None)])
def test_attention(capability, width, window):
    compile_attention(capability, width, window)


@pytest.mark.parametrize("capability", [80, 86, 89, 100, 120])
def test_small_attention(capability):
    module = module_of("attention")
    names = ("FORWARD_TILES", "QUERY_GRAD_TILES", "KEY_GRAD_TILES")
    with mock.patch.multiple(module, **{name: {64: module.Tiles(16, 16, 4, 1)} for name in names}):
        compile_attention(capability, 64, None)


def compile_attention(capability, width, window):
    module, num_tokens = module_of("attention"), 300
    q, k, d_out = (torch.empty(num_tokens, num, width, dtype=BF16) for num in (8, 2, 8))
    documents = module.Documents(torch.empty(4, dtype=torch.int32), torch.empty(num_tokens, dtype=torch.int32))
    options = {"scale": 0.1, "window": window}

    def launch():
        out, lse = module.attend(q, k, k, documents, sink_H=torch.empty(8) if window else None, **options)
        module.attend_backward(q, k, k, documents, out_THW=out, lse_HT=lse, d_out_THW=d_out, **options)

    kernels = compile_launches(module, capability, launch)
    # The fastest tiles for queries of width 128 exceed the registers by 88 bytes a thread.
    assert max(map(stack_bytes, kernels)) <= 96


@GPUS
@pytest.mark.parametrize(("num_heads", "width", "times"), [(8, 128, 5), (2, 64, 8), (3, 96, 7)])
def test_repeat_heads(capability, dtype, num_heads, width, times):
    module, x = module_of("repeat_heads"), torch.empty(64, num_heads, width, dtype=dtype)
    compile_launches(module, capability, lambda: module.repeat_heads(x, num_heads * times))


@GPUS
@pytest.mark.parametrize(
    ("num_columns", "is_set"), [(1, False), (13, True), (128, False), (2880, True), (16384, False)]
)
def test_rms_norm(capability, dtype, num_columns, is_set):
    module, form = module_of("rms_norm"), NormForm(is_weight_wide=is_set)
    x, weight, d_y, addend = norm_cases.make_inputs(64, num_columns, dtype, form, weight_dtype=FP32)

    def launch():
        module.rms_norm_forward(x, weight, form=form)
        more = {"addend_TD": addend, "out": d_y, "rstd_out": torch.empty(64)} if is_set else {}
        module.rms_norm_backward(d_y, x, weight, form=form, needs_weight=is_set, **more)

    # A product that lanes exchange may be fused with the sum after it: each lane rounds its own less than that of the
    # other, so that lanes hold different sums of one row, and all of them write theirs to one place in shared memory.
    for kernel in compile_launches(module, capability, launch):
        exchanged = set(re.findall(r"shfl[.]sync[.]bfly[.]b32\s+%\w+, (%\w+),", kernel.asm["ptx"]))
        assert exchanged or num_columns == 1
        assert not exchanged & set(re.findall(r"mul[.]f32\s+(%\w+),", kernel.asm["ptx"]))


@pytest.mark.parametrize(
    ("capability", "dtype", "num_states", "width"),
    [(90, BF16, 128, 64)]
    + [
        pytest.param(*case, marks=pytest.mark.fault)
        for case in ((90, BF16, 256, 80), (86, FP32, 64, 64), *((gpu, FP16, 128, 64) for gpu in (80, 86, 89, 100, 120)))
    ],
)
def test_state_scan(capability, dtype, num_states, width):
    compile_state_scan(capability, dtype, num_states, width)


@pytest.mark.parametrize("capability", [80, 86, 89, 100, 120])
def test_small_state_scan(capability):
    compile_state_scan(capability, BF16, 16, 16, chunk_tokens=16)


def compile_state_scan(capability, dtype, num_states, width, *, chunk_tokens=64):
    module, lengths = module_of("state_scan"), (64, 130)
    *inputs, _ = scan_cases.make_inputs(lengths, heads=128, width=width, groups=8, states=num_states, dtype=dtype)
    chunks = scan_cases.make_chunks(lengths, chunk_tokens)
    skip = torch.empty(128)

    def launch():
        y = module.scan_forward(*inputs, skip, chunks=chunks)
        module.scan_backward(y, *inputs, skip, chunks=chunks)

    kernels = compile_launches(module, capability, launch)
    num_spilled = max(map(stack_bytes, kernels)) if capability == 90 else 0
    if num_spilled and num_states == 128:
        skip_before_triton((3, 9), f"a thread spills {num_spilled} bytes")
    assert num_spilled == 0, "more registers than a thread has"
