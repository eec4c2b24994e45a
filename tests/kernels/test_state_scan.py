"""The scan of Mamba-2: the formula against a recurrence, and refusals on a CPU; the kernels by the compiler.

``tests/kernels/triton_state_scan.py`` runs them in the interpreter.
"""

import pytest
import torch

from lightning_fastft.core.errors import ShapeError
from lightning_fastft.kernels.state_scan import reference
from lightning_fastft.kernels.state_scan.op import state_scan
from lightning_fastft.packing.chunks import Chunks
from tests.support.kernel_harness import NUM_RUNS
from tests.support.truth import fresh_memory_is_nan, one_unit

NAMES = ("x_THW", "dt_TH", "a_H", "b_TGN", "c_TGN", "skip_H")
# Errors of a handful of values are luck: plain PyTorch is measured on so many times the heads, of which ours are the
# first.
NUM_MEASURED = 16


def make_chunks(lengths, size, *, device="cpu"):
    counts = [-(-length // size) for length in lengths]
    offsets = [[0, *torch.tensor(values).cumsum(0).tolist()] for values in (lengths, counts)]
    index = [(document, chunk) for document, count in enumerate(counts) for chunk in range(count)]
    return Chunks(*(torch.tensor(values, dtype=torch.int32, device=device) for values in (*offsets, index)), size)


def make_inputs(lengths, *, heads, width, groups, states, dtype=torch.float32, device="cpu", seed=0):
    """Inputs as a mixer has them: x, b and c side by side in rows, with NaN around each row and around all of them."""
    torch.manual_seed(seed)
    sizes = [heads * width, groups * states, groups * states]
    room = torch.full((sum(lengths) + 2, sum(sizes) + 3), float("nan"))
    rows = room[1:-1, 1:-2]
    rows.copy_(torch.randn(rows.shape) * 0.7)
    x, b, c = room.to(device=device, dtype=dtype)[1:-1, 1:-2].split(sizes, dim=1)
    dt_TH = torch.rand(sum(lengths), heads, device=device)
    # Heads that forget at once, and others that hardly forget.
    a_H = torch.tensor([-16.0, -0.01, -1.0], device=device).repeat(heads)[:heads]
    shapes = [(heads, width), (groups, states), (groups, states)]
    x_THW, b_TGN, c_TGN = (part.unflatten(1, shape) for part, shape in zip((x, b, c), shapes))
    return x_THW, dt_TH, a_H, b_TGN, c_TGN, torch.randn(heads, device=device)


def run_reference(inputs, d_y_THW, *, chunks, dtype=None):
    """Outputs and gradients of the plain twin; with a dtype all is computed in it."""
    inputs = [(each.detach() if dtype is None else each.detach().to(dtype)).requires_grad_() for each in inputs]
    y_THW = reference.scan(*inputs, chunks=chunks)
    y_THW.backward(d_y_THW.to(y_THW.dtype))
    return [y_THW.detach(), *(each.grad for each in inputs)]


def check_against_truth(functions, lengths, *, size, heads, groups, dtype=torch.float32, device="cpu", **widths):
    """Outputs and gradients of the kernels against float64, on a device twice with the same bits; the inputs stay."""
    sizes = {"heads": heads * NUM_MEASURED, "groups": groups * NUM_MEASURED, **widths}
    inputs = make_inputs(lengths, dtype=dtype, device=device, **sizes)
    d_y_THW = torch.randn(inputs[0].shape, device=device).to(dtype)
    chunks = make_chunks(lengths, size, device=device)
    x_THW, dt_TH, a_H, b_TGN, c_TGN, skip_H = inputs
    of_heads, of_groups = (slice(None), slice(heads)), (slice(None), slice(groups))
    ours = (
        x_THW[of_heads],
        dt_TH[of_heads].contiguous(),
        a_H[:heads],
        b_TGN[of_groups],
        c_TGN[of_groups],
        skip_H[:heads],
    )

    def run():
        with fresh_memory_is_nan():
            y_THW = functions.scan_forward(*ours, chunks=chunks)
            return [y_THW, *functions.scan_backward(d_y_THW[of_heads].contiguous(), *ours, chunks=chunks)]

    before = [each.clone() for each in ours]
    values, *seconds = (run() for _ in range(NUM_RUNS))
    assert all(map(torch.equal, ours, before))
    truth = run_reference(inputs, d_y_THW, chunks=chunks, dtype=torch.float64)
    plain = run_reference(inputs, d_y_THW, chunks=chunks)
    for name, value, *others in zip(("y_THW", *NAMES), values, plain, truth):
        assert_close_to_truth(name, value, *others)
    assert all(torch.equal(value, other) for second in seconds for value, other in zip(values, second))


def assert_close_to_truth(name, value, plain, truth):
    """As ``assert_within_bound``, with the errors of plain PyTorch on all heads that were measured.

    The relative error is bounded too, because the first bound is that of the largest value. It is relative to the
    values of all heads where those of ours cancel.
    """
    first = truth[tuple(slice(size) for size in value.shape)]
    errors, plain_errors = value.double() - first, plain.double() - truth
    bound = max(2 * plain_errors.abs().max().item(), one_unit(truth, value.dtype))
    assert errors.abs().max() <= bound, f"{name}: error {errors.abs().max():.3g} above {bound:.3g}"
    size = root_mean_square(truth) or 1.0
    bound = max(2 * root_mean_square(plain_errors) / size, 16 * torch.finfo(value.dtype).eps)
    error = root_mean_square(errors) / max(size, root_mean_square(first))
    assert error <= bound, f"{name}: relative error {error:.3g} above {bound:.3g}"


def root_mean_square(values):
    return values.square().mean().sqrt().item()


def recurrence(x_THW, dt_TH, a_H, b_TGN, c_TGN, skip_H, *, lengths):
    """Mamba-2 token by token, as it is defined."""
    heads, groups = x_THW.shape[1], b_TGN.shape[1]
    outputs = []
    for is_first in (place == 0 for length in lengths for place in range(length)):
        t = len(outputs)
        b, c = (each[t].repeat_interleave(heads // groups, dim=0) for each in (b_TGN, c_TGN))
        state = 0 if is_first else state * (dt_TH[t] * a_H).exp()[:, None, None]  # noqa: F821
        state = state + dt_TH[t][:, None, None] * b[:, :, None] * x_THW[t][:, None, :]
        outputs.append((c[:, :, None] * state).sum(1) + skip_H[:, None] * x_THW[t])
    return torch.stack(outputs)


def test_the_formula_is_the_recurrence():
    lengths = (5, 1, 2, 9)
    inputs = [each.double() for each in make_inputs(lengths, heads=4, width=3, groups=2, states=5)]
    value = state_scan(*inputs, chunks=make_chunks(lengths, 16))
    torch.testing.assert_close(value, recurrence(*inputs, lengths=lengths))


def test_gradients_are_those_of_the_formula():
    lengths = (3, 1, 2)
    inputs = [each.double().requires_grad_() for each in make_inputs(lengths, heads=2, width=2, groups=1, states=3)]
    assert torch.autograd.gradcheck(lambda *each: state_scan(*each, chunks=make_chunks(lengths, 16)), inputs)


def change(**replaced):
    names = dict(zip(NAMES, make_inputs((3, 2), heads=4, width=3, groups=2, states=5)))
    chunks = make_chunks((3, 2), 16)._replace(**{key: value for key, value in replaced.items() if key not in names})
    return [replaced.get(name, value) for name, value in names.items()], chunks


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        (
            {"x_THW": torch.ones(5, 3, 3), "dt_TH": torch.ones(5, 3), "a_H": torch.ones(3), "skip_H": torch.ones(3)},
            "gr",
        ),
        ({"size": 128}, "128 tokens"),
    ],
)
def test_what_the_kernels_would_read_wrongly_is_refused(replaced, message):
    inputs, chunks = change(**replaced)
    with pytest.raises(ShapeError, match=message):
        state_scan(*inputs, chunks=chunks)


def test_the_meta_device_has_the_shapes_of_the_scan():
    lengths = (5, 70, 1)
    inputs = make_inputs(lengths, heads=4, width=6, groups=2, states=3, dtype=torch.bfloat16)

    def shapes(device):
        leaves = [each.detach().to(device).requires_grad_() for each in inputs]
        y_THW = state_scan(*leaves, chunks=make_chunks(lengths, 64, device=device))
        y_THW.sum().backward()
        return [(each.shape, each.dtype) for each in (y_THW, *(leaf.grad for leaf in leaves))]

    assert shapes("meta") == shapes("cpu")
