"""Tests of the Triton kernels, run in a process of their own: TRITON_INTERPRET must be set before Triton is first
imported.

``test_interpreted.py`` runs them in the interpreter, ``tests/gpu/test_state_scan_gpu.py`` on the device.
"""

from unittest import mock

import pytest
import torch

from lightning_fastft.kernels.state_scan import triton
from tests.kernels.test_state_scan import check_against_truth, make_chunks, make_inputs, run_reference
from tests.support.kernel_harness import DEVICE, NARROW, planted_faults
from tests.support.truth import relative_error

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


def test_neighbours_far_into_a_chunk_decay_exactly():
    """The sums are near -1,000 there, and the decay between the last two tokens is exp(-0.16)."""
    x, dt, a, b, c, skip = make_inputs((64,), heads=1, width=16, groups=1, states=16, device=DEVICE)
    dt = torch.full_like(dt, 1.0)
    dt[-2:] = 0.01
    inputs = (x, dt, a, b, c, torch.zeros_like(skip))
    chunks = make_chunks((64,), 64, device=DEVICE)
    truth = run_reference(inputs, torch.ones_like(x), chunks=chunks, dtype=torch.float64)[0]
    assert relative_error(triton.scan_forward(*inputs, chunks=chunks)[-1], truth[-1]) < 8e-7


FAULTS = {
    "state carried over a border": "state = tl.{zeros((BLOCK_N, BLOCK_W) => full((BLOCK_N, BLOCK_W), 0.1}, dtype=tl.float32) for number",
    "last token of a document": "return rows.to(tl.int64), rows < tl.load(start_ptr + document + 1){ => - 1}",
    "state of the next document": "inside_rows = rows < {end => end + 1}",
    "state not decayed": "x, {state * tl.exp(tl.sum(logs)) => state}",
    "state on leaving": "dt * tl.exp({_sum_later => tl.cumsum}(logs))",
    "later tokens": "tl.cumsum(logs, reverse=True){- logs => }",
    "reversed weight": "weight = {tl => dt * tl}.exp(tl.cumsum(logs)) if",
    "order of the chunks": "place = {num_chunks - 1 - number => number} if",
    "group of a head, states": "b_ptr += head {// (NUM_H // NUM_G) => % NUM_G} * NUM_N",
    "a token sees the next": "is_seen = places[:, None] {>= => >} places[None, :] decay = _decay(sums, lost, is_seen) x =",
    "state on entry not decayed": "y *= {tl.exp(sums)[:, None] => 1.0}",
    "skip lost": "y += {tl.load(skip_ptr + head) * x.to(tl.float32) => 0.0}",
    "skip of another head": "y += tl.load({skip_ptr + head => skip_ptr})",
    "skip lost in the gradient": "+ {skip => 0.0} * wide_d_y",
    "gradient by the state lost": "d_y, d_x * {(leave * dt)[:, None] => 0.0}",
    "decay from a token to the next": "tl.where(places[:, None] > places[None, :]{ => + 1}, pairs",
    "decay of the state on leaving": "{(tl.cumsum(left_dt) - left_dt => tl.cumsum(left_dt})",
    "decay of the whole chunk": "tl.{exp(tl.sum(dt * a)) * tl.sum => sum}(d_total)",
    "time step by the state": "+ {left * leave + a => a} * d_logs",
    "time step by the decay": "+ left * {leave + a * d_logs => leave}",
    "gradient of the decay rate": "tl.sum({dt * d_logs => d_logs})",
    "state of another head": "state_ptrs = (chunk * NUM_H + {head => part * HEADS}) * (NUM_N * NUM_W)",
    "gradient of c by the state": "d_c += {enter => leave}[:, None]",
    "gradient of b by the state": "d_b += {leave => enter}[:, None]",
    "heads of one part": "tl.range(0, {HEADS => HEADS - 1}, num_stages=1)",
    "parts of another group": "parts.view(num_tokens, {num_groups, -1, num_n).sum(2 => -1, num_groups, num_n).sum(1})",
}


def check_every_part(functions):
    with mock.patch.object(functions, "MAX_HEADS_PER_PROGRAM", 2):
        check(functions, lengths=(3, 34, 2), width=5, states=3)
    with mock.patch.object(functions, "MAX_HEADS_PER_PROGRAM", 1):
        check(functions, lengths=(18,), heads=4, groups=2, width=5, states=3)


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    triton, check_every_part, FAULTS
)
