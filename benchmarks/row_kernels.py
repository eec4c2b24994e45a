"""Time the memory-bound row kernels, and compare each with the bytes that it must move.

    python -m benchmarks.row_kernels
    python -m benchmarks.row_kernels --only cross_entropy --tiles
    python -m benchmarks.row_kernels --only rms_norm expert_gate --tiles
    python -m benchmarks.row_kernels --only "expert_gate backward" --rows 32768 --expert-width 14336 --tiles
    python -m benchmarks.row_kernels --only block_diagonal --tiles block_diagonal=1024,4 block_diagonal=8192,8

RMSNorm, expert gate, thin product added in place, losses and divergences of rows of logits, norm and rotation of heads,
block-diagonal matrix, rows and NF4 in e4m3, dequantised NF4 and the AdamW step, in bf16 at the sizes of Qwen3-14B
(8,192 tokens; 5,120 and 17,408 columns; 2,048 rows of logits over the vocabularies of Qwen3 and gpt-oss). Before a
kernel is timed its results are compared with those of its plain twin. Then 5 warm-up runs and 30 timed ones, each
between two CUDA events and after a write of 256 MiB that empties the L2 cache; a sleep of the device before each lets
the host run ahead. The table has the median, the bytes of inputs and outputs, each counted once, and the reached share
of 4.2 TB/s; rows.csv also has p10 and p90.

With --tiles candidates for the constants of each kernel are timed too, or those given as KERNEL=V,V (order in
CONSTANTS).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from benchmarks.results import append_rows
from benchmarks.ruler.cases import versions
from benchmarks.ruler.measure import StepClock, summarise_ms

NUM_WARMUP, NUM_RUNS = 5, 30
# Rate of copies of this size on an H200, whose data sheet has 4.8 TB/s.
REACHABLE_BYTES_PER_S = 4.2e12
# More than the L2 cache of any GPU so far.
FLUSH_BYTES = 256 * 2**20
# Cycles for which the device sleeps before each run, about a millisecond: longer than the host needs for a launch.
SLEEP_CYCLES = 2_000_000
HEAD_WIDTH, NUM_KV_HEADS, RANK = 128, 8, 16

# The constants of each kernel that --tiles sets, and candidates for better values.
CONSTANTS = {
    "rms_norm": ("TILE_SIZE", "VALUES_PER_THREAD", "MIN_WARPS", "MAX_WARPS", "MAX_PROGRAMS"),
    "expert_gate": (
        "BLOCK_ROWS",
        "MAX_BLOCK_COLUMNS",
        "NUM_WARPS",
        "ADDEND_BLOCK_ROWS",
        "ADDEND_MAX_BLOCK_COLUMNS",
        "MAX_BLOCK_RANKS",
    ),
    "cross_entropy": ("MAX_LANES", "MAX_DEPTH", "NUM_WARPS"),
    "divergence": ("MAX_LANES", "MAX_DEPTH", "NUM_WARPS"),
    "qk_rope": ("MAX_TILE", "NUM_WARPS"),
    "block_diagonal": ("TILE_SIZE", "NUM_WARPS"),
    "nf4_linear": ("TILE_WORDS", "NUM_WARPS"),
    "fp8_linear": (
        "TILE_COLUMNS",
        "NUM_WARPS",
        "MAX_TILES",
        "BLOCK_ROWS",
        "TRANSPOSED_BLOCK_ROWS",
        "CHUNK_BLOCKS",
        "NUM_WEIGHT_WARPS",
        "TILE_T",
        "TILE_I",
        "NUM_TRANSPOSE_WARPS",
    ),
    "low_rank_add": ("BLOCK_ROWS", "BLOCK_COLUMNS", "NUM_WARPS", "TRANSPOSED", "MAX_BLOCK_RANKS"),
    "adamw_step": ("CHUNK", "NUM_WARPS", "NUM_PARTIALS", "NUM_BLOCKS", "NUM_WARPS_8BIT"),
}
CANDIDATES = {
    "rms_norm": (
        "2048,32,4,4,512",
        "2048,32,8,8,512",
        "2048,32,16,16,512",
        "2048,32,32,32,512",
        "2048,32,8,16,256",
        "2048,32,8,16,1024",
    ),
    "expert_gate": (
        "4,512,4,16,64,32",
        "2,1024,4,32,64,32",
        "4,256,4,32,32,32",
        "8,512,8,32,128,32",
        "4,1024,8,64,64,32",
    ),
    "cross_entropy": ("1024,4,4", "2048,4,8", "2048,8,8", "4096,2,16", "4096,4,16", "8192,2,32", "8192,4,32"),
    "divergence": ("1024,2,4", "1024,4,8", "2048,1,8", "2048,4,8", "2048,2,16", "4096,1,16", "4096,2,16"),
    "qk_rope": ("1024,4", "4096,4", "2048,8"),
    "block_diagonal": ("512,4", "1024,4", "4096,4", "8192,4", "8192,8"),
    "nf4_linear": ("256,4", "1024,4", "512,8", "1024,8"),
    "fp8_linear": (
        "2048,8,32,64,64,32,4,128,64,4",
        "4096,8,4,64,128,8,4,64,128,4",
        "1024,4,16,32,256,4,4,64,64,4",
        "2048,8,8,64,128,4,8,128,128,4",
        "2048,8,8,128,128,2,4,256,64,8",
        "2048,8,4,32,128,8,4,64,64,2",
    ),
    # Rows, columns, warps, both orders of the product.
    "low_rank_add": tuple(
        f"{rows},{columns},{warps},{is_transposed},32"
        for rows, columns, warps, is_transposed in itertools.product((16, 32, 64), (64, 128, 256), (4, 8), (1, 0))
    ),
    "adamw_step": (
        "2048,4,1024,8,4",
        "2048,8,1024,4,2",
        "4096,4,1024,2,2",
        "8192,8,1024,2,1",
        "4096,8,512,8,8",
        "4096,8,2048,16,8",
    ),
}


class Sizes(NamedTuple):
    """Rows and columns of the cases: tokens, model width, expert width, rows of logits, vocabularies."""

    num_rows: int
    width: int
    expert_width: int
    num_loss_rows: int
    vocabularies: tuple[int, ...]


SIZES = Sizes(8192, 5120, 17408, 2048, (151936, 201088))
# More columns of logits than two tiles of any form have.
TINY_SIZES = Sizes(6, 192, 24, 3, (8300,))
# Runs a kernel, or its twin, which has the same names; returns the results to compare.
Run = Callable[[Any], Sequence[torch.Tensor | None]]


class Case(NamedTuple):
    """One kernel at one size: its folder, its operation, the bytes that it must move, and the builder of its inputs."""

    kernel: str
    name: str
    workload: str
    num_bytes: int
    make: Callable[[str], Run]


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    is_cuda = options.device == "cuda"
    if not is_cuda:
        # Read when triton is imported, which happens later.
        os.environ["TRITON_INTERPRET"] = "1"
    options.out.mkdir(parents=True, exist_ok=True)
    packages = versions()
    shared = {
        "benchmark": "row_kernels",
        "version": f"torch {packages['torch']}; triton {packages.get('triton', 'none')}",
        "n": options.runs,
        "command": "python -m benchmarks.row_kernels " + " ".join(sys.argv[1:]),
        "device": packages.get("device", "cpu"),
    }
    print(f"{'kernel':<46} {'size':<18} {'arm':<30} {'p50 us':>9} {'MB':>9} {'of 4.2 TB/s':>11}")
    has_failed = False
    for case in all_cases(_sizes(options)):
        if options.only and not any(part in case.name for part in options.only):
            continue
        for arm, module, constants in all_arms(case.kernel, tiles=options.tiles):
            with constants_set(case.kernel, module, constants):
                wrong, times_us = measure(case, module, device=options.device, num_runs=options.runs)
            head = f"{case.name:<46} {case.workload:<18} {arm:<30}"
            if wrong:
                has_failed = True
                print(f"{head} {wrong}", flush=True)
                continue
            summary = summarise_ms(times_us)
            share = case.num_bytes / REACHABLE_BYTES_PER_S / (summary["median"] / 1e6)
            print(f"{head} {summary['median']:9.1f} {case.num_bytes / 1e6:9.1f} {share:11.1%}", flush=True)
            row = {**shared, "workload": f"{case.name}, {case.workload}", "system": arm}
            rows = [
                {
                    **row,
                    "metric": "time",
                    "value": summary["median"],
                    "p10": summary["p10"],
                    "p90": summary["p90"],
                    "unit": "us",
                },
                {**row, "metric": "rate", "value": case.num_bytes / summary["median"] / 1e6, "unit": "TB/s"},
            ]
            append_rows(rows, path=options.out / "rows.csv")
    return int(has_failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/row_kernels"))
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of the cases to run; default: all")
    parser.add_argument(
        "--tiles", nargs="*", metavar="KERNEL=V,V", help="time other constants too: those given, or all candidates"
    )
    parser.add_argument("--rows", type=int, help="tokens")
    parser.add_argument("--width", type=int, help="columns of norms, thin products, rotation and AdamW")
    parser.add_argument("--expert-width", type=int, help="columns of the gate")
    parser.add_argument("--loss-rows", type=int, help="rows of logits")
    parser.add_argument("--vocabularies", type=int, nargs="+", help="columns of logits")
    parser.add_argument("--runs", type=int, default=NUM_RUNS)
    parser.add_argument(
        "--device",
        default="cuda",
        choices=("cuda", "cpu"),
        help="cpu: tiny sizes in Triton's interpreter, to see that it runs",
    )
    return parser


def _sizes(options: argparse.Namespace) -> Sizes:
    usual = SIZES if options.device == "cuda" else TINY_SIZES
    return Sizes(
        options.rows or usual.num_rows,
        options.width or usual.width,
        options.expert_width or usual.expert_width,
        options.loss_rows or usual.num_loss_rows,
        tuple(options.vocabularies or usual.vocabularies),
    )


# Arms: the module that runs, and the constants that it has.


def all_arms(kernel: str, *, tiles: list[str] | None) -> Iterator[tuple[str, ModuleType, str | None]]:
    """Yield name, module and constants (None for the present ones) of every timed variant of a kernel."""
    module = importlib.import_module(f"lightning_fastft.kernels.{kernel}.triton")
    in_use = ",".join(str(int(getattr(module, name))) for name in CONSTANTS[kernel])
    yield f"in use {in_use}", module, None
    if tiles is not None:
        given = [text.partition("=") for text in tiles]
        candidates = [values for name, _, values in given if name == kernel] if given else CANDIDATES[kernel]
        for text in candidates:
            if text != in_use:
                yield text, module, text


@contextmanager
def constants_set(kernel: str, module: ModuleType, text: str | None) -> Iterator[None]:
    """Change the constants of a kernel temporarily, in each of its modules that reads them."""
    package = f"lightning_fastft.kernels.{kernel}."
    others = [place for name, place in sys.modules.items() if name.startswith(package) and place is not module]
    values = {} if text is None else dict(zip(CONSTANTS[kernel], map(int, text.split(",")), strict=True))
    changed = [
        (place, name, getattr(place, name), value)
        for name, value in values.items()
        for place in (module, *others)
        if hasattr(place, name)
    ]
    for place, name, _, value in changed:
        setattr(place, name, value)
    try:
        yield
    finally:
        for place, name, old, _ in changed:
            setattr(place, name, old)


# Time.


def measure(case: Case, module: ModuleType, *, device: str, num_runs: int) -> tuple[str | None, list[float]]:
    """Return why the results are wrong, or None, and the microseconds of each run."""
    twin = importlib.import_module(f"lightning_fastft.kernels.{case.kernel}.reference")
    # Some kernels overwrite their inputs, so each run has its own equal ones.
    torch.manual_seed(0)
    truth = case.make(device)(twin)
    torch.manual_seed(0)
    run = case.make(device)
    wrong = compare(run(module), truth)
    del truth
    if wrong is not None:
        return wrong, []
    is_cuda = device == "cuda"
    for _ in range(NUM_WARMUP if is_cuda else 0):
        run(module)
    flush = torch.empty(FLUSH_BYTES if is_cuda else 0, dtype=torch.uint8, device=device)
    clocks = []
    for _ in range(num_runs):
        if is_cuda:
            torch.cuda._sleep(SLEEP_CYCLES)
        flush.zero_()
        clock = StepClock(is_cuda=is_cuda)
        clock.mark()
        run(module)
        clock.mark()
        clocks.append(clock)
    return None, [clock.read_ms()[0] * 1e3 for clock in clocks]


def compare(ours: Sequence[torch.Tensor | None], truth: Sequence[torch.Tensor | None]) -> str | None:
    """Return the results that differ by more than two roundings of a narrow dtype, or than the error of fp32 sums and
    exponentials; None if there are none.
    """
    for place, (one, other) in enumerate(zip(ours, truth, strict=True)):
        if one is None or other is None:
            if one is not other:
                return f"WRONG: result {place} is missing in one of the two"
            continue
        if not one.is_floating_point():
            if not torch.equal(one, other):
                return f"WRONG: result {place} differs"
            continue
        largest = other.abs().max().float()
        bound = largest * (2**-16 if one.dtype is torch.float32 else 2 * torch.finfo(one.dtype).eps)
        error = (one.float() - other.float()).abs().max()
        # NaN fails too.
        if not bool(error <= bound):
            return f"WRONG: result {place} has error {float(error):.3g} above {float(bound):.3g}"
    return None


# Cases.


def all_cases(sizes: Sizes) -> list[Case]:
    """Return every kernel at every size, in the order of the table."""
    return [*row_cases(sizes), *loss_cases(sizes), *weight_cases(sizes)]


def row_cases(sizes: Sizes) -> list[Case]:
    """Return the kernels on rows of tokens."""
    rows, width, expert_width = sizes[:3]
    states, gates, weight = 2 * rows * width, 2 * rows * expert_width, 2 * width
    norms: dict[str, tuple[int, Callable[[str], Run]]] = {
        "forward": (2 * states + weight, norm_forward(rows, width)),
        "backward": (4 * states + weight, norm_backward(rows, width)),
        "backward, weight trained": (4 * states + 3 * weight, norm_backward(rows, width, needs_weight=True)),
    }
    products: dict[str, tuple[int, Callable[[str], Run]]] = {
        "forward": (3 * gates, gate_forward(rows, expert_width)),
        "backward, activation": (6 * gates, gate_backward(rows, expert_width)),
        "backward, sums of rows": (6 * gates + 8 * rows, gate_backward(rows, expert_width, has_weights=True)),
        "backward, sums of rows, clamped pairs": (
            6 * gates + 8 * rows,
            gate_backward(rows, expert_width, has_weights=True, is_gpt_oss=True),
        ),
    }
    for num_ranks in (RANK, 4 * RANK):
        factors = 2 * num_ranks * (rows + expert_width)
        products[f"backward, {num_ranks} ranks added"] = (
            6 * gates + factors,
            gate_backward(rows, expert_width, num_ranks=num_ranks),
        )
    thin: dict[str, tuple[int, bool, bool]] = {
        f"{RANK} ranks": (RANK, False, True),
        f"{RANK} ranks, residual": (RANK, True, True),
        f"{3 * RANK} ranks, factor in rows": (3 * RANK, False, False),
    }
    head_width, num_heads, num_kv_heads = head_sizes(width)
    columns = (num_heads + 2 * num_kv_heads) * head_width
    angles, head_weights = 4 * rows * head_width, 4 * head_width
    return [
        *(Case("rms_norm", f"rms_norm {name}", f"{rows} x {width}", *rest) for name, rest in norms.items()),
        *(
            Case("expert_gate", f"expert_gate {name}", f"{rows} x {expert_width}", *rest)
            for name, rest in products.items()
        ),
        *(
            Case(
                "low_rank_add",
                f"low_rank_add {name}",
                f"{rows} x {width}",
                (3 if has_residual else 2) * states + 2 * num_ranks * (rows + width),
                low_rank_add(
                    rows,
                    width,
                    num_ranks=num_ranks,
                    has_residual=has_residual,
                    is_factor_transposed=is_factor_transposed,
                ),
            )
            for name, (num_ranks, has_residual, is_factor_transposed) in thin.items()
        ),
        Case(
            "qk_rope",
            "qk_rope forward",
            f"{rows} x {columns}",
            4 * rows * columns + angles + head_weights,
            rope_forward(rows, width),
        ),
    ]


def loss_cases(sizes: Sizes) -> list[Case]:
    """Return the kernels on rows of logits, which are read once, or read and written once."""
    rows, cases = sizes.num_loss_rows, []
    for vocabulary in sizes.vocabularies:
        logits, workload = 2 * rows * vocabulary, f"{rows} x {vocabulary}"
        loss, gradient = (
            row_losses(rows, vocabulary, gradient_factor=None),
            row_losses(rows, vocabulary, gradient_factor=0.75),
        )
        cases += [
            Case("cross_entropy", "cross_entropy loss", workload, logits + 13 * rows, loss),
            Case("cross_entropy", "cross_entropy loss and gradient", workload, 2 * logits + 12 * rows, gradient),
        ]
        cases += [
            Case(
                "divergence",
                f"divergence {kind} and gradient",
                workload,
                3 * logits + 4 * rows,
                row_divergences(rows, vocabulary, kind=kind),
            )
            for kind in ("forward_kl", "jsd")
        ]
    return cases


def weight_cases(sizes: Sizes) -> list[Case]:
    """Return the kernels on weights: those of the fused gate and up projection, and of an optimizer."""
    rows, width, outputs = sizes.num_rows, sizes.width, 2 * sizes.expert_width
    num_weights = outputs * width
    fp8_bytes = nf4_bytes(num_weights) - num_weights + 4 * outputs
    return [
        Case("fp8_linear", "fp8_linear rows", f"{rows} x {width}", rows * (3 * width + 4), fp8_rows(rows, width)),
        Case(
            "fp8_linear",
            "fp8_linear rows",
            f"{rows} x {sizes.expert_width}",
            rows * (3 * sizes.expert_width + 4),
            fp8_rows(rows, sizes.expert_width),
        ),
        Case(
            "fp8_linear",
            "fp8_linear rows, times factors",
            f"{rows} x {outputs}",
            rows * (3 * outputs + 4) + 2 * outputs,
            fp8_rows(rows, outputs, has_factor=True),
        ),
        Case(
            "fp8_linear",
            "fp8_linear transpose, shifted",
            f"{rows} x {outputs}",
            rows * (2 * outputs + 4),
            fp8_transpose(rows, outputs),
        ),
        Case("fp8_linear", "fp8_linear NF4", f"{outputs} x {width}", fp8_bytes, nf4_to_fp8(outputs, width)),
        Case(
            "fp8_linear",
            "fp8_linear NF4, transposed",
            f"{outputs} x {width}",
            fp8_bytes,
            nf4_to_fp8(outputs, width, is_transposed=True),
        ),
        Case(
            "block_diagonal",
            "block_diagonal",
            f"{outputs} x {2 * RANK}",
            6 * outputs * RANK,
            block_diagonal(outputs, width),
        ),
        Case(
            "nf4_linear",
            "nf4_linear to dense",
            f"{outputs} x {width}",
            nf4_bytes(outputs * width),
            nf4_to_dense(outputs, width),
        ),
        Case(
            "adamw_step",
            "adamw_step, fp32 with bf16 copy",
            f"{rows} x {width}",
            30 * rows * width,
            adamw_step(rows, width, is_norm=False),
        ),
        Case(
            "adamw_step",
            "adamw_step, bf16, averages in 8 bits",
            f"{rows} x {width}",
            10 * rows * width,
            adamw_8bit_step(rows, width),
        ),
        Case(
            "adamw_step",
            "adamw_step gradient norm",
            f"{rows} x {width}",
            4 * rows * width + 4,
            adamw_step(rows, width, is_norm=True),
        ),
    ]


def narrow(device: str) -> torch.dtype:
    """Return the dtype of the cases: fp16 on a CPU, because Triton's interpreter truncates to bf16."""
    return torch.float16 if device == "cpu" else torch.bfloat16


def _randn(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(*shape, dtype=narrow(device), device=device)


def norm_forward(num_rows: int, width: int) -> Callable[[str], Run]:
    """Norm of rows."""

    def make(device: str) -> Run:
        from lightning_fastft.kernels.rms_norm.reference import NormForm

        x_TD, weight_D = _randn(num_rows, width, device=device), _randn(width, device=device)
        return lambda module: [module.rms_norm_forward(x_TD, weight_D, form=NormForm())]

    return make


def norm_backward(num_rows: int, width: int, *, needs_weight: bool = False) -> Callable[[str], Run]:
    """Gradient of rows added to that of the residual stream, and of the weight."""

    def make(device: str) -> Run:
        from lightning_fastft.kernels.rms_norm.reference import NormForm

        d_y_TD, x_TD, addend_TD = (_randn(num_rows, width, device=device) for _ in range(3))
        weight_D = _randn(width, device=device)
        return lambda module: module.rms_norm_backward(
            d_y_TD, x_TD, weight_D, form=NormForm(), addend_TD=addend_TD, needs_weight=needs_weight
        )

    return make


def gate_forward(num_rows: int, width: int) -> Callable[[str], Run]:
    """SwiGLU of concatenated gate and up."""

    def make(device: str) -> Run:
        from lightning_fastft.kernels.expert_gate.reference import GateForm

        gate_up_NP = _randn(num_rows, 2 * width, device=device)
        return lambda module: [module.gate_forward(gate_up_NP, form=GateForm())]

    return make


def gate_backward(
    num_rows: int, width: int, *, has_weights: bool = False, num_ranks: int = 0, is_gpt_oss: bool = False
) -> Callable[[str], Run]:
    """Gradients and the activation again; with routing weights a program walks over all columns of its rows, with
    ranks it adds their product. The gate of gpt-oss alternates with the up columns.
    """

    def make(device: str) -> Run:
        from lightning_fastft.kernels.expert_gate.reference import GateForm, LowRankRows

        gate_up_NP, d_act_NF = _randn(num_rows, 2 * width, device=device), _randn(num_rows, width, device=device)
        weight_N = torch.rand(num_rows, device=device) if has_weights else None
        addend = (
            LowRankRows(_randn(num_rows, num_ranks, device=device), _randn(num_ranks, width, device=device))
            if num_ranks
            else None
        )
        form = GateForm(is_interleaved=True, activation="clamped") if is_gpt_oss else GateForm()
        return lambda module: module.gate_backward(
            d_act_NF, gate_up_NP, form=form, weight_N=weight_N, addend=addend, need_act=True
        )

    return make


def low_rank_add(
    num_rows: int, width: int, *, num_ranks: int, has_residual: bool, is_factor_transposed: bool
) -> Callable[[str], Run]:
    """A thin product added in place, as a layer adds its adapter: forward by B transposed, backward by the stored A."""

    def make(device: str) -> Run:
        base_TN, low_TR = _randn(num_rows, width, device=device), _randn(num_rows, num_ranks, device=device)
        factor_RN = (
            _randn(width, num_ranks, device=device).T
            if is_factor_transposed
            else _randn(num_ranks, width, device=device)
        )
        residual_TN = _randn(num_rows, width, device=device) if has_residual else None
        return lambda module: [module.add_low_rank(base_TN, low_TR, factor_RN, residual_TN=residual_TN, out=base_TN)]

    return make


def row_losses(num_rows: int, vocabulary: int, *, gradient_factor: float | None) -> Callable[[str], Run]:
    """Losses of rows of logits: with hits and no gradient, as in validation, or with the gradient in place of the
    logits, as in training.
    """

    def make(device: str) -> Run:
        logits_RV = 4.0 * _randn(num_rows, vocabulary, device=device)
        target_R = torch.randint(0, vocabulary, (num_rows,), device=device)
        # With hits, so that the comparison with the twin covers them.
        target_R[::2] = logits_RV[::2].argmax(dim=1)
        options = {
            "scale": 1.0,
            "softcap": None,
            "gradient_factor": gradient_factor,
            "count_correct": gradient_factor is None,
        }

        def run(module: Any) -> Sequence[torch.Tensor | None]:
            losses = module.row_losses(logits_RV, target_R, **options)
            return *losses, logits_RV

        return run

    return make


def row_divergences(num_rows: int, vocabulary: int, *, kind: str) -> Callable[[str], Run]:
    """Divergences of rows of a student's logits from a teacher's, with the gradient in place of the student's."""

    def make(device: str) -> Run:
        from lightning_fastft.kernels.divergence.reference import DivergenceForm

        logits_RV, teacher_RV = (4.0 * _randn(num_rows, vocabulary, device=device) for _ in range(2))
        form = DivergenceForm(kind, 0.5, 1.0, None, 1.0, None)

        def run(module: Any) -> Sequence[torch.Tensor | None]:
            return module.row_divergences(logits_RV, teacher_RV, form=form, writes_gradient=True), logits_RV

        return run

    return make


def head_sizes(width: int) -> tuple[int, int, int]:
    """Return width and number of query heads, and the number of key heads."""
    head_width = min(HEAD_WIDTH, width)
    num_heads = width // head_width
    return head_width, num_heads, min(NUM_KV_HEADS, num_heads)


def rope_forward(num_rows: int, width: int) -> Callable[[str], Run]:
    """Norm and rotation of q and k, and a copy of v."""

    def make(device: str) -> Run:
        from lightning_fastft.kernels.qk_rope.reference import Rope, RopeForm

        head_width, num_heads, num_kv_heads = head_sizes(width)
        form = RopeForm(num_heads=num_heads, num_kv_heads=num_kv_heads, head_width=head_width, has_norm=True)
        qkv_TC = _randn(num_rows, form.num_columns, device=device)
        angle_TW = torch.rand(num_rows, head_width, device=device)
        cos_TW, sin_TW = angle_TW.cos().to(narrow(device)), angle_TW.sin().to(narrow(device))
        q_weight_W, k_weight_W = _randn(head_width, device=device), _randn(head_width, device=device)
        rope = Rope(cos_TW, sin_TW, q_weight_W, k_weight_W, form)
        return lambda module: [*module.qk_rope_heads(qkv_TC, rope)]

    return make


def block_diagonal(num_outputs: int, width: int) -> Callable[[str], Run]:
    """The factors of two adapters written next to the columns of a dense matrix."""

    def make(device: str) -> Run:
        dense = torch.zeros(num_outputs, width + 2 * RANK, dtype=narrow(device), device=device)
        blocks = [_randn(num_outputs // 2, RANK, device=device) for _ in range(2)]

        def run(module: Any) -> Sequence[torch.Tensor | None]:
            module.write_block_diagonal(dense[:, width:], blocks)
            return [dense]

        return run

    return make


def nf4_bytes(num_weights: int) -> int:
    """Return the bytes of NF4 weights with double quantisation, with their two tables and offset, and of the result in
    bf16.
    """
    num_blocks = num_weights // 64
    return num_weights // 2 + num_blocks + 4 * -(-num_blocks // 256) + 4 * (16 + 256 + 1) + 2 * num_weights


def make_nf4(num_outputs: int, width: int, *, device: str) -> Any:
    """One weight with double quantisation."""
    from lightning_fastft.kernels.nf4_linear.reference import NF4Weight

    num_blocks = num_outputs * width // 64
    return NF4Weight(
        torch.randint(0, 256, (32 * num_blocks,), dtype=torch.uint8, device=device),
        torch.randint(0, 256, (num_blocks,), dtype=torch.uint8, device=device),
        torch.rand(-(-num_blocks // 256), device=device),
        torch.rand((), device=device),
        torch.linspace(-1.0, 1.0, 16, device=device),
        torch.linspace(-1.0, 1.0, 256, device=device),
    )


def nf4_to_dense(num_outputs: int, width: int) -> Callable[[str], Run]:
    """One dequantised weight."""

    def make(device: str) -> Run:
        weight = make_nf4(num_outputs, width, device=device)
        out_OI = torch.empty(num_outputs, width, dtype=narrow(device), device=device)

        def run(module: Any) -> Sequence[torch.Tensor | None]:
            module.dequantise_many([weight], [out_OI])
            return [out_OI]

        return run

    return make


def nf4_to_fp8(num_outputs: int, width: int, *, is_transposed: bool = False) -> Callable[[str], Run]:
    """One weight in e4m3, with known scales of its rows."""

    def make(device: str) -> Run:
        from lightning_fastft.kernels.fp8_linear import reference

        weight = make_nf4(num_outputs, width, device=device)
        scale_O = torch.empty(num_outputs, device=device)
        reference.nf4_row_scales([weight], [scale_O])
        values = torch.empty(
            (width, num_outputs) if is_transposed else (num_outputs, width), dtype=reference.FP8, device=device
        )

        def run(module: Any) -> Sequence[torch.Tensor | None]:
            module.quantise_nf4([weight], [values], [scale_O], is_transposed=is_transposed)
            return [_comparable(values), scale_O]

        return run

    return make


def _comparable(values: torch.Tensor) -> torch.Tensor | None:
    """Return the bytes of e4m3 numbers, which must be equal; None on a CPU, where the interpreter loses the carry of
    this cast.
    """
    return values.view(torch.uint8) if values.is_cuda else None


def fp8_rows(num_rows: int, width: int, *, has_factor: bool = False) -> Callable[[str], Run]:
    """Rows in e4m3, or rows times the scales of a weight."""

    def make(device: str) -> Run:
        x_TI = _randn(num_rows, width, device=device)
        factor_I = torch.randint(-12, -6, (width,), device=device).float().exp2().bfloat16() if has_factor else None

        def run(module: Any) -> Sequence[torch.Tensor | None]:
            rows = module.quantise_rows(x_TI, factor_I=factor_I, round_scales_to_power_of_2=False)
            return [_comparable(rows.values_TI), rows.scale_T]

        return run

    return make


def fp8_transpose(num_rows: int, width: int) -> Callable[[str], Run]:
    """The transpose of rows in e4m3, each times a power of 2, as the gradient of a weight reads it."""

    def make(device: str) -> Run:
        from lightning_fastft.kernels.fp8_linear import reference

        values_TI = _randn(num_rows, width, device=device).to(reference.FP8)
        shift_T = torch.randint(-6, 1, (num_rows,), device=device).float().exp2()
        out_IT = torch.empty(width, num_rows, dtype=reference.FP8, device=device)

        def run(module: Any) -> Sequence[torch.Tensor | None]:
            module.transpose(values_TI, shift_T=shift_T, out_IT=out_IT)
            return [_comparable(out_IT)]

        return run

    return make


def adamw_step(num_rows: int, width: int, *, is_norm: bool) -> Callable[[str], Run]:
    """Step of one fp32 master with fp32 gradient and its bf16 copy for compute, or the norm of its gradient."""

    def make(device: str) -> Run:
        from lightning_fastft.kernels.adamw_step.reference import StepOptions
        from lightning_fastft.kernels.adamw_step.table import TensorTable

        param, exp_avg, grad = (torch.randn(num_rows, width, device=device) for _ in range(3))
        exp_avg_sq, copy = torch.rand(num_rows, width, device=device), param.to(narrow(device))
        param.grad = grad
        table = TensorTable([param], exp_avgs=[exp_avg], exp_avg_sqs=[exp_avg_sq], copies=[copy])

        def run(module: Any) -> Sequence[torch.Tensor | None]:
            if is_norm:
                return [module.grad_norm(table)]
            with torch.no_grad():
                module.adamw_step(table, options=StepOptions(learning_rate=1e-3, step=3))
            return param, exp_avg, exp_avg_sq, copy

        return run

    return make


def adamw_8bit_step(num_rows: int, width: int) -> Callable[[str], Run]:
    """Step of one bf16 parameter with bf16 gradient and 8-bit moments."""

    def make(device: str) -> Run:
        from lightning_fastft.kernels.adamw_step import codes
        from lightning_fastft.kernels.adamw_step.reference import StepOptions
        from lightning_fastft.kernels.adamw_step.table import TensorTable

        # The interpreter truncates to bf16 instead of rounding, and parameters are never fp16.
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        param, grad = (torch.randn(num_rows, width, device=device).to(dtype) for _ in range(2))
        average, square = torch.randn(num_rows, width, device=device), torch.rand(num_rows, width, device=device)
        param.grad = grad
        (exp_avg, absmax_B), (exp_avg_sq, absmax_sq_B) = (
            codes.encode(average, is_signed=True),
            codes.encode(square, is_signed=False),
        )
        table = TensorTable(
            [param],
            exp_avgs=[exp_avg],
            exp_avg_sqs=[exp_avg_sq],
            exp_avg_absmaxs=[absmax_B],
            exp_avg_sq_absmaxs=[absmax_sq_B],
        )

        def run(module: Any) -> Sequence[torch.Tensor | None]:
            with torch.no_grad():
                module.adamw_step(table, options=StepOptions(learning_rate=1e-3, step=3))
            return param, absmax_B, absmax_sq_B

        return run

    return make


if __name__ == "__main__":
    raise SystemExit(main())
