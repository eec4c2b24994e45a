"""Gradients of chunked linear attention on a CUDA device: its tests there, and the truth at the size of a layer."""

import pytest
import torch

from lightning_fastft.kernels.chunk_gradients import reference
from lightning_fastft.kernels.chunk_gradients.op import chunk_gradients
from tests.kernels.test_chunk_gradients import make_inputs, plain_gradients, run
from tests.support.host_waits import waits_are_errors
from tests.support.truth import assert_within_bound

pytestmark = pytest.mark.gpu
LENGTHS = (1, 1000, 2, 513, 64)


def test_gradients_of_a_layer_equal_the_truth_without_a_host_sync():
    inputs, offsets = make_inputs((4, 8, 128, 128), torch.bfloat16, lengths=LENGTHS, device="cuda")
    truth = run(reference.chunk_gradients, {name: x.double() for name, x in inputs.items()}, offsets)
    plain = run(plain_gradients, inputs, offsets)
    run(chunk_gradients, inputs, offsets)
    torch.cuda.synchronize()
    with waits_are_errors():
        found = run(chunk_gradients, inputs, offsets)
    names = ("d_q_THK", "d_k_THK", "d_w_TJK", "d_decay_TJ")
    for name, ours, one_plain, one_truth in zip(names, found, plain, truth, strict=True):
        assert_within_bound(name, ours, plain=one_plain, truth=one_truth, dtype=ours.dtype)
