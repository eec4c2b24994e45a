"""Columns times factors: truth and refusals on a CPU by the plain twin; the kernels in the interpreter and by the
compiler.
"""

import pytest
import torch

from lightning_fastft.core.errors import ShapeError
from lightning_fastft.kernels.column_scale import reference
from lightning_fastft.kernels.column_scale.op import (
    row_factors,
    scale_by_magnitude,
    scale_columns,
    scale_columns_backward,
)
from tests.support.kernel_harness import planted_faults
from tests.support.truth import (
    BESIDE,
    Watch,
    assert_nothing_beside,
    assert_within_bound,
    fresh_memory_is_nan,
    poisoned,
    room_for,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PLACES = ("new", "apart", "x", "addend")


def make_inputs(num_rows, num_columns, dtype, *, device="cpu"):
    """Columns, factors, offsets and an addend."""
    x_TN, addend_TN = (torch.randn(num_rows, num_columns, device=device).to(dtype) for _ in range(2))
    return x_TN, torch.rand(num_columns, device=device) + 0.5, torch.randn(num_columns, device=device), addend_TN


def formula(x_TN, factor_N, offset_N, addend_TN, *, alpha, wide):
    """The scaled columns in another dtype."""
    y_TN = alpha * (x_TN.to(wide) * factor_N.to(wide) + (0.0 if offset_N is None else offset_N.to(wide)))
    return y_TN if addend_TN is None else y_TN + addend_TN.to(wide)


def check(scale, shape, dtype, *, device="cpu", has_offset=False, has_addend=False, alpha=1.0, place="new"):
    """Equal to the truth; nothing is written beside the output."""
    x_TN, factor_N, offset_N, addend_TN = make_inputs(*shape, dtype, device=device)
    offset_N, addend_TN = (offset_N if has_offset else None), (addend_TN if has_addend or place == "addend" else None)
    given = x_TN, factor_N, offset_N, addend_TN
    truth, plain = (formula(*given, alpha=alpha, wide=wide) for wide in (torch.float64, torch.float32))
    ours_TN = poisoned(x_TN)
    ours_addend_TN = None if addend_TN is None else poisoned(addend_TN)
    out = {"new": None, "apart": room_for(x_TN), "x": ours_TN, "addend": ours_addend_TN}[place]
    with fresh_memory_is_nan():
        y_TN = scale(ours_TN, factor_N, offset_N=offset_N, addend_TN=ours_addend_TN, alpha=alpha, out=out)
    assert y_TN is out if out is not None else y_TN.is_contiguous()
    assert y_TN.dtype is dtype
    for tensor in (ours_TN, ours_addend_TN):
        if tensor is not None:
            assert_nothing_beside(tensor)
    if place == "apart":
        assert_nothing_beside(out, fill=BESIDE)
    assert_within_bound(f"scaled, {place}", y_TN, plain=plain.to(dtype), truth=truth, dtype=dtype)


def check_backward(backward, shape, dtype, *, device="cpu", has_saved=True, needs_totals=True, place="new"):
    """Gradient and sums equal the truth; nothing is written beside the output."""
    d_y_TN, factor_N, _, saved_TN = make_inputs(*shape, dtype, device=device)
    ours_TN, ours_saved_TN = poisoned(d_y_TN), poisoned(saved_TN) if has_saved else None
    out = {"new": None, "apart": room_for(d_y_TN), "x": ours_TN}[place]
    with fresh_memory_is_nan():
        found = backward(ours_TN, ours_saved_TN, factor_N, needs_totals=needs_totals, out=out)
    assert place == "new" or found[0] is out
    if place == "apart":
        assert_nothing_beside(out, fill=BESIDE)
    assert_nothing_beside(ours_TN)
    truths = [
        torch.stack([d_y_TN.to(wide) * factor_N.to(wide), d_y_TN.to(wide) * saved_TN.to(wide), d_y_TN.to(wide)])
        for wide in (torch.float64, torch.float32)
    ]
    truth, plain = truths
    assert_within_bound("d_x", found[0], plain=plain[0].to(dtype), truth=truth[0], dtype=dtype)
    sums = ((found[1], 1, has_saved), (found[2], 2, needs_totals))
    for ours_N, place_of, is_there in sums:
        assert (ours_N is not None) == is_there
        if ours_N is not None:
            assert ours_N.dtype is torch.float32
            bound = 1e-6 * truth[place_of].abs().sum(dim=0)
            assert ((ours_N - truth[place_of].sum(dim=0)).abs() <= bound).all(), "sums"


def before_nan(tensor):
    """The same values, contiguous, with NaN in the memory after them."""
    memory = torch.full((tensor.numel() + 64,), float("nan"), dtype=tensor.dtype, device=tensor.device)
    return memory[: tensor.numel()].view(tensor.shape).copy_(tensor)


def check_factors(factors, shape, num_ranks, dtype, *, device="cpu"):
    """Factors equal the truth, of a weight whose rows lie apart; nothing is written beside them, and it is noted."""
    num_outputs, num_inputs = shape
    weight_NI, a_RI, b_NR = (
        torch.randn(*size, device=device).to(dtype)
        for size in ((num_outputs, num_inputs), (num_ranks, num_inputs), (num_outputs, num_ranks))
    )
    # Columns of another size than the first ones.
    weight_NI[:, num_inputs // 2 :] *= 3.0
    magnitude_N, scale = torch.rand(num_outputs, device=device) + 0.5, 0.7
    buffer = torch.full((4, num_outputs), BESIDE, device=device)
    out = buffer[1:3].fill_(float("nan"))
    version = out._version
    with fresh_memory_is_nan():
        found = factors(poisoned(weight_NI), before_nan(a_RI), before_nan(b_NR), magnitude_N, scale=scale, out=out)
    assert found is out
    assert out._version > version, "a write that autograd does not see"
    assert (buffer == BESIDE).sum() == 2 * num_outputs, "written beside"
    norm_N = (weight_NI.double() + scale * b_NR.double() @ a_RI.double()).norm(dim=1)
    terms_N = (weight_NI.double().abs() + scale * b_NR.double().abs() @ a_RI.double().abs()).norm(dim=1)
    assert ((1.0 / out[1].double() - norm_N).abs() <= 1e-6 * terms_N).all()
    torch.testing.assert_close(out[0], magnitude_N * out[1], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_factors_equal_the_truth(dtype):
    for shape in ((1, 1), (7, 5), (33, 130)):
        for num_ranks in (1, 4, 70):
            check_factors(row_factors, shape, num_ranks, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", PLACES)
def test_the_scaled_columns_equal_the_truth(place, dtype):
    for shape in ((1, 1), (7, 5), (65, 130)):
        for has_offset in (False, True):
            check(scale_columns, shape, dtype, has_offset=has_offset, has_addend=place == "apart", place=place)
            check(scale_columns, shape, dtype, has_offset=has_offset, has_addend=has_offset, alpha=0.5, place=place)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", ["new", "apart", "x"])
def test_the_gradients_equal_the_truth(place, dtype):
    for shape in ((1, 1), (7, 5), (300, 130)):
        check_backward(scale_columns_backward, shape, dtype, place=place)
        check_backward(scale_columns_backward, shape, dtype, has_saved=False, needs_totals=False, place=place)


@pytest.mark.parametrize("has_bias", [False, True])
def test_the_gradients_of_a_scaled_layer_equal_autograds(has_bias):
    x, bias_N = torch.randn(2, 5, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64) if has_bias else None
    norm_N = torch.rand(3, dtype=torch.float64) + 0.5
    bias = 0.0 if bias_N is None else bias_N
    found = []
    for is_ours in (True, False):
        leaf, magnitude_N = (
            x.clone().requires_grad_(),
            torch.linspace(1.0, 2.0, 3, dtype=torch.float64).requires_grad_(),
        )
        factors_2N = torch.stack([magnitude_N.detach() / norm_N, 1.0 / norm_N])
        if is_ours:
            y = scale_by_magnitude(leaf, magnitude_N, factors_2N, bias_N=bias_N)
        else:
            y = (leaf - bias) * (magnitude_N / norm_N) + bias
        d_y = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        found.append([y, *torch.autograd.grad(y, [leaf, magnitude_N], d_y)])
    for ours, expected in zip(*found):
        torch.testing.assert_close(ours, expected, rtol=1e-13, atol=1e-13)


def test_a_transposed_gradient_is_taken():
    x, magnitude_N, factors_2N = torch.randn(1, 5, 3, requires_grad=True), torch.ones(3), torch.rand(2, 3)
    scale_by_magnitude(x, magnitude_N, factors_2N).transpose(1, 2).sum(1).cumsum(-1).sum().backward()
    assert torch.allclose(x.grad, torch.arange(5.0, 0.0, -1.0)[:, None] * factors_2N[0])


@pytest.mark.parametrize("shape", [(5, 3), (1, 5, 3)])
def test_the_output_of_a_layer_may_be_written_to_in_place(shape):
    x, magnitude_N, factors_2N = (
        torch.ones(shape, requires_grad=True),
        torch.ones(3),
        torch.tensor([[1.0, 2.0, 3.0]] * 2),
    )
    y = scale_by_magnitude(x, magnitude_N.requires_grad_(), factors_2N)
    y.clamp_(max=2.5).sum().backward()
    assert torch.equal(x.grad, torch.tensor([1.0, 2.0, 0.0]).expand(shape))
    assert torch.equal(magnitude_N.grad, torch.tensor([5.0, 10.0, 0.0]))


def test_no_graph_and_no_wait():
    x_TN, factor_N, offset_N, addend_TN = make_inputs(7, 5, torch.float32)
    with Watch() as watch:
        y_TN = scale_columns(x_TN.requires_grad_(), factor_N, offset_N=offset_N, addend_TN=addend_TN)
        found = scale_columns_backward(addend_TN, x_TN, factor_N, needs_totals=True)
    assert watch.waits == []
    assert not any(tensor.requires_grad for tensor in (y_TN, *found))


@pytest.mark.parametrize("shape", [(0, 0), (0, 6), (3, 0)])
def test_without_rows_or_columns(shape):
    x_TN, factor_N, _, _ = make_inputs(*shape, torch.float32)
    assert scale_columns(x_TN, factor_N).shape == shape
    _, products_N, _ = scale_columns_backward(x_TN, x_TN, factor_N, needs_totals=True)
    assert torch.equal(products_N, torch.zeros(shape[1]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out": torch.ones(4).expand(3, 4)}, "rows of out overlap"),
    ],
)
def test_impossible_arguments_are_refused(change, message):
    arguments = {"x_TN": torch.ones(3, 4), "factor_N": torch.ones(4), **change}
    with pytest.raises(ShapeError, match=message):
        scale_columns(**arguments)


def test_a_gradient_over_the_saved_columns_is_refused():
    d_y_TN, saved_TN = torch.ones(3, 4), torch.ones(3, 4)
    with pytest.raises(ShapeError, match="out shares memory"):
        scale_columns_backward(d_y_TN, saved_TN, torch.ones(4), out=saved_TN)


REFERENCE_FAULTS = {
    "offset lost": "{y_TN += offset_N => pass}",
    "addend lost": "{y_TN += addend_TN => pass}",
    "alpha lost": "{y_TN *= alpha => pass}",
    "scale of the adapter lost": "a_RI.to(wide){, alpha=scale => }",
    "factor lost in the gradient": "wide_TN{ * factor_N => }",
    "memory that was given not used": "return y_TN.to(x_TN.dtype){ if out is None else out.copy_(y_TN) => }",
    "sum of saved columns": "{(wide_TN * saved_TN) => (0.0 * wide_TN + saved_TN)}.sum",
}


def check_every_part(functions):
    for place in PLACES:
        shape, dtype = (9, 130), torch.bfloat16
        check(functions.scale_columns, shape, dtype, has_offset=True, has_addend=True, alpha=0.3, place=place)
    check_backward(functions.scale_columns_backward, (9, 130), torch.bfloat16)
    check_factors(functions.row_factors, (9, 130), 5, torch.bfloat16)


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    reference, check_every_part, REFERENCE_FAULTS
)
