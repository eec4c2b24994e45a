"""Tests of the Triton kernels, run in a process of their own: TRITON_INTERPRET must be set before Triton is first
imported.

``test_interpreted.py`` runs them in the interpreter, ``tests/gpu/test_state_scan_gpu.py`` on the device.
"""

import os

import pytest
import torch

from lightning_fastft.kernels.state_scan import triton
from tests.kernels.test_state_scan import check_against_truth
from tests.support.truth import load_with_fault

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
# The interpreter multiplies the bits of bf16 where a kernel multiplies matrices.
NARROW = torch.float16 if DEVICE == "cpu" else torch.bfloat16
SMALL = {"heads": 2, "width": 16, "groups": 1, "states": 16}


def check(functions=triton, lengths=(7, 1, 33, 2), *, size=16, **options):
    check_against_truth(functions, lengths, size=size, device=DEVICE, **{**SMALL, **options})


@pytest.mark.parametrize("dtype", [torch.float32, NARROW])
def test_documents_of_every_kind(dtype):
    """Of one and two tokens, of a part of a chunk, and of more than two chunks."""
    check(dtype=dtype)


@pytest.mark.parametrize("lengths", [(1,), (16,), (15, 16, 17), (1, 1)])
def test_lengths_around_a_chunk(lengths):
    check(lengths=lengths)


@pytest.mark.parametrize("size", [32, 64])
def test_size_of_a_chunk(size):
    check(lengths=(size + 6, 2), size=size)


@pytest.mark.parametrize(
    "sizes",
    [
        {"width": 5, "states": 3},
        {"width": 70, "states": 80},
        {"heads": 6, "groups": 3},
        {"heads": 8, "groups": 2, "width": 4},
    ],
    ids=["below a tile", "more than a tile", "groups", "groups of more heads than a program sums"],
)
def test_sizes(sizes, monkeypatch):
    monkeypatch.setattr(triton, "MAX_HEADS_PER_PROGRAM", 2)
    check(lengths=(3, 20), **sizes)


FAULTS = {
    "state carried over a border": (
        "state = tl.zeros((BLOCK_N, BLOCK_W), dtype=tl.float32)\n    for number",
        "state = tl.full((BLOCK_N, BLOCK_W), 0.1, dtype=tl.float32)\n    for number",
    ),
    "last token of a document": (
        "return rows.to(tl.int64), rows < tl.load(start_ptr + document + 1)",
        "return rows.to(tl.int64), rows < tl.load(start_ptr + document + 1) - 1",
    ),
    "state of the next document": ("inside_rows = rows < end\n", "inside_rows = rows < end + 1\n"),
    "state not decayed": ("x, state * tl.exp(tl.sum(logs))", "x, state"),
    "state on leaving": ("dt * tl.exp(_sum_later(logs))", "dt * tl.exp(tl.cumsum(logs))"),
    "later tokens": ("tl.cumsum(logs, reverse=True) - logs", "tl.cumsum(logs, reverse=True)"),
    "reversed weight": ("weight = tl.exp(tl.cumsum(logs)) if", "weight = dt * tl.exp(tl.cumsum(logs)) if"),
    "order of the chunks": ("place = num_chunks - 1 - number if", "place = number if"),
    "group of a head, states": ("b_ptr += head // (NUM_H // NUM_G) * NUM_N", "b_ptr += head % NUM_G * NUM_N"),
    "a token sees the next": (
        "is_seen = places[:, None] >= places[None, :]\n    decay = tl.exp(tl.where(is_seen, sums[:, None] - sums"
        '[None, :], float("-inf")))\n    x =',
        "is_seen = places[:, None] > places[None, :]\n    decay = tl.exp(tl.where(is_seen, sums[:, None] - sums"
        '[None, :], float("-inf")))\n    x =',
    ),
    "state on entry not decayed": ("y *= tl.exp(sums)[:, None]", "y *= 1.0"),
    "skip lost": ("y += tl.load(skip_ptr + head) * x.to(tl.float32)", "y += 0.0"),
    "skip of another head": ("y += tl.load(skip_ptr + head)", "y += tl.load(skip_ptr)"),
    "skip lost in the gradient": ("+ skip * wide_d_y", "+ 0.0 * wide_d_y"),
    "gradient by the state lost": ("d_y, d_x * (leave * dt)[:, None]", "d_y, d_x * 0.0"),
    "decay from a token to the next": (
        "tl.where(places[:, None] > places[None, :], pairs",
        "tl.where(places[:, None] > places[None, :] + 1, pairs",
    ),
    "decay of the state on leaving": ("(tl.cumsum(left_dt) - left_dt)", "tl.cumsum(left_dt)"),
    "decay of the whole chunk": ("tl.exp(tl.sum(dt * a)) * tl.sum(d_total)", "tl.sum(d_total)"),
    "time step by the state": ("+ left * leave + a * d_logs", "+ a * d_logs"),
    "time step by the decay": ("+ left * leave + a * d_logs", "+ left * leave"),
    "gradient of the decay rate": ("tl.sum(dt * d_logs)", "tl.sum(d_logs)"),
    "state of another head": (
        "state_ptrs = (chunk * NUM_H + head) * (NUM_N * NUM_W)",
        "state_ptrs = (chunk * NUM_H + part * HEADS) * (NUM_N * NUM_W)",
    ),
    "gradient of c by the state": ("d_c += enter[:, None]", "d_c += leave[:, None]"),
    "gradient of b by the state": ("d_b += leave[:, None]", "d_b += enter[:, None]"),
    "heads of one part": ("tl.range(0, HEADS, num_stages=1)", "tl.range(0, HEADS - 1, num_stages=1)"),
    "parts of another group": (
        "parts.view(num_tokens, num_groups, -1, num_n).sum(2)",
        ("parts.view(num_tokens, -1, num_groups, num_n).sum(1)"),
    ),
}


def check_every_part(functions):
    functions.MAX_HEADS_PER_PROGRAM = 2
    check(functions, lengths=(3, 34, 2), width=5, states=3)
    functions.MAX_HEADS_PER_PROGRAM = 1
    check(functions, lengths=(18,), heads=4, groups=2, width=5, states=3)


@pytest.mark.skipif(DEVICE == "cuda", reason="planted faults read out of bounds; they belong into the interpreter")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault, tmp_path):
    faulty = load_with_fault(triton, *FAULTS[fault], tmp_path)
    with pytest.raises(AssertionError):
        check_every_part(faulty)


def test_without_a_fault_the_same_check_passes(monkeypatch):
    monkeypatch.setattr(triton, "MAX_HEADS_PER_PROGRAM", triton.MAX_HEADS_PER_PROGRAM)
    check_every_part(triton)
