"""Gradients of chunked linear attention: the reference against autograd, and refusals; the kernel in the interpreter."""

import math

import pytest
import torch

from lightning_fastft.core.errors import ShapeError
from lightning_fastft.kernels.chunk_gradients import reference
from lightning_fastft.kernels.chunk_gradients.op import chunk_gradients
from lightning_fastft.kernels.chunk_gradients.reference import CHUNK, ChunkInputs
from tests.support.truth import assert_within_bound, fresh_memory_is_nan

LENGTHS = (1, CHUNK + 3, 2, 2 * CHUNK, 5)
# Heads of queries, of values, and their widths.
SHAPES = ((1, 1, 16, 16), (2, 4, 24, 40), (1, 3, 70, 16))
NAMES = ("q", "k", "v", "d_out", "state", "d_state", "decay", "d_value")


def make_chunks(lengths):
    """Offsets of documents, and document and place of each chunk."""
    chunks = [(document, place) for document, length in enumerate(lengths) for place in range(-(-length // CHUNK))]
    start_S1 = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return start_S1, torch.tensor(chunks, dtype=torch.int32).reshape(-1, 2)


def make_inputs(shape, dtype, *, lengths=LENGTHS, device="cpu"):
    """Inputs by name, with decays that fall inside each chunk, and the offsets."""
    (num_heads, num_value_heads, num_keys, num_values), num_tokens = shape, sum(lengths)
    start_S1, chunk_N2 = make_chunks(lengths)
    keys, values = (num_tokens, num_heads, num_keys), (num_tokens, num_value_heads, num_values)
    states = (len(chunk_N2), num_value_heads, num_keys, num_values)
    tensors = {
        "q": keys,
        "k": keys,
        "v": values,
        "d_out": values,
        "state": states,
        "d_state": states,
        "d_value": values,
    }
    inputs = {name: (torch.randn(size) / math.sqrt(num_keys)).to(device, dtype) for name, size in tensors.items()}
    decay_TJ = torch.empty(num_tokens, num_value_heads)
    for document, place in chunk_N2.tolist():
        begin = start_S1[document].item() + place * CHUNK
        rows = slice(begin, min(begin + CHUNK, start_S1[document + 1].item()))
        decay_TJ[rows] = -torch.rand(decay_TJ[rows].shape).cumsum(0) / 4
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    inputs["decay"] = decay_TJ.to(device, wide)
    return inputs, {"start_S1": start_S1.to(device), "chunk_N2": chunk_N2.to(device)}


def run(function, inputs, offsets, **options):
    """Call a form of the function on inputs by name."""
    rows = [inputs[name] for name in NAMES[:-1]]
    return function(ChunkInputs(*rows, **offsets, scale=0.7, d_value_TJV=inputs.get("d_value")), **options)


def check(function, shape, dtype, *, lengths=LENGTHS, device="cpu"):
    """Every gradient is as near to the truth as plain PyTorch in the same dtype."""
    inputs, offsets = make_inputs(shape, dtype, lengths=lengths, device=device)
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    truth = run(reference.chunk_gradients, {name: x.double() for name, x in inputs.items()}, offsets)
    plain = run(plain_gradients, inputs, offsets)
    with fresh_memory_is_nan():
        found = run(function, inputs, offsets)
    names = ("d_q", "d_k", "d_w", "d_decay")
    for name, ours, one_plain, one_truth in zip(names, found, plain, truth):
        assert_within_bound(name, ours, plain=one_plain, truth=one_truth, dtype=ours.dtype)
    assert all(torch.equal(inputs[name], before[name]) for name in inputs), "an input was written"


def plain_gradients(inputs):
    """The reference whose scores and states are rounded before they are multiplied, as tensor cores take them."""
    dtype = inputs.q_THK.dtype

    class Rounding(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if "matmul" in function.__name__ and dtype is not torch.float64:
                args = [one.to(dtype).float() for one in args]
            return function(*args, **(kwargs or {}))

    with Rounding():
        return reference.chunk_gradients(inputs)


def forward(q, k, u, w, decays, *, scale, lengths):
    """Outputs, values and all states of the chunked form, token by token inside chunks; one head, float64."""
    outputs, values, states, ends = [], [], [], []
    begin = 0
    for length in lengths:
        state = torch.zeros(q.shape[1], u.shape[1], dtype=q.dtype, requires_grad=True)
        for first in range(begin, begin + length, CHUNK):
            rows = slice(first, min(first + CHUNK, begin + length))
            # A leaf of its own: the gradient of a state counts what its chunk makes of it.
            states.append(state)
            decay = decays[rows]
            value = u[rows] - w[rows] @ state
            value.retain_grad()
            seen = torch.exp(decay[:, None] - decay[None, :]).tril()
            out = scale * (decay.exp()[:, None] * (q[rows] @ state) + (q[rows] @ k[rows].T * seen).tril() @ value)
            state = decay[-1].exp() * state + (k[rows] * (decay[-1] - decay).exp()[:, None]).T @ value
            state.retain_grad()
            outputs.append(out), values.append(value), ends.append(state)
        begin += length
    return torch.cat(outputs), values, states, ends


def test_reference_is_what_autograd_gives():
    lengths = (1, 2 * CHUNK + 3, 5)
    num_tokens = sum(lengths)
    q, k, w, u = (torch.randn(num_tokens, 6, dtype=torch.float64) / 3 for _ in range(4))
    decays = torch.cat([-torch.rand(min(CHUNK, n - at), dtype=torch.float64).cumsum(0) / 4 for n in lengths for at in range(0, n, CHUNK)])  # fmt: skip
    leaves = [x.requires_grad_() for x in (q, k, w, u, decays)]
    out, values, states, ends = forward(q, k, u, w, decays, scale=0.7, lengths=lengths)
    d_out = torch.randn_like(out)
    out.backward(d_out)
    start_S1, chunk_N2 = make_chunks(lengths)
    inputs = ChunkInputs(
        *(x.detach()[:, None] for x in (q, k, torch.cat(values), d_out)),
        torch.stack(states)[:, None].detach(),
        torch.stack([torch.zeros_like(end) if end.grad is None else end.grad for end in ends])[:, None],
        decays.detach()[:, None] / math.log(2),
        start_S1=start_S1,
        chunk_N2=chunk_N2,
        scale=0.7,
        d_value_TJV=torch.cat([value.grad for value in values])[:, None],
    )
    found = reference.chunk_gradients(inputs)
    q, k, w, _, decays = leaves
    for ours, leaf in zip(found, (q, k, w, decays), strict=True):
        torch.testing.assert_close(ours[:, 0], leaf.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_through_the_op(dtype):
    check(chunk_gradients, SHAPES[1], dtype)


def test_without_chunks():
    inputs, offsets = make_inputs(SHAPES[0], torch.float32, lengths=())
    assert run(chunk_gradients, inputs, offsets)[0].shape == (0, 1, 16)


@pytest.mark.parametrize(
    ("name", "change", "word"),
    [
        ("v", lambda x: x[:, :3].contiguous(), "evenly"),
    ],
)
def test_tensors_that_do_not_belong_together_are_refused(name, change, word):
    inputs, offsets = make_inputs(SHAPES[1], torch.float32)
    inputs[name] = change(inputs[name])
    with pytest.raises(ShapeError, match=word):
        run(chunk_gradients, inputs, offsets)


def test_the_meta_device_has_the_shapes_of_the_gradients():
    inputs, offsets = make_inputs((2, 4, 24, 40), torch.bfloat16)

    def shapes(device):
        moved = ({name: each.to(device) for name, each in given.items()} for given in (inputs, offsets))
        return [(each.shape, each.dtype) for each in run(chunk_gradients, *moved)]

    assert shapes("meta") == shapes("cpu")
