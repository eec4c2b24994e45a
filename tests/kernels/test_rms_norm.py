"""RMSNorm: formula, gradient and refusals on a CPU by the plain twin; the kernels in the
interpreter and by the compiler.
"""

import pytest
import torch

from lightning_fastft.core.errors import OptionError, ShapeError
from lightning_fastft.kernels.backends import wide_dtype
from lightning_fastft.kernels.rms_norm import op, reference
from lightning_fastft.kernels.rms_norm.op import MAX_COLUMNS, rms_norm_backward, rms_norm_forward
from lightning_fastft.kernels.rms_norm.reference import NormForm
from tests.support.kernel_harness import fixtures_of, planted_faults
from tests.support.truth import (
    NUM_FOR_SHARE,
    SHARE,
    Watch,
    assert_nothing_beside,
    assert_within_bound,
    fresh_memory_is_nan,
    poisoned,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LLAMA, GPT_OSS, GEMMA = (
    NormForm(),
    NormForm(eps=1e-5, is_weight_wide=True),
    NormForm(weight_offset=1.0, is_weight_wide=True),
)
FORMS = (LLAMA, GPT_OSS, GEMMA, NormForm(weight_offset=1.0))
# Errors of a handful of values are luck: plain PyTorch and the largest value are measured on at least so many rows, of
# which ours are the first; of wide rows fewer are enough values.
NUM_MEASURED_ROWS, NUM_MEASURED_VALUES = 513, 2**19


def formula(x_TD, weight_D, form):
    """What transformers writes; ``test_the_formula_is_that_of_transformers`` compares."""
    wide = wide_dtype(x_TD.dtype)
    hidden = x_TD.to(wide)
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + form.eps)
    if form.is_weight_wide or form.weight_offset:
        return (
            (hidden if form.is_weight_wide else hidden.to(x_TD.dtype)) * (form.weight_offset + weight_D.to(wide))
        ).to(x_TD.dtype)
    return (weight_D * hidden.to(x_TD.dtype)).to(x_TD.dtype)


def run_formula(d_y_TD, x_TD, weight_D, addend_TD, form, *, wide):
    """Reciprocal root and gradients of the formula in a wide dtype through autograd; the weight has one gradient
    per row.
    """
    x_TD = x_TD.detach().to(wide).requires_grad_()
    weight_TD = weight_D.detach().to(wide).expand(x_TD.shape).requires_grad_()
    (formula(x_TD, weight_TD, form) * d_y_TD.to(wide)).sum().backward()
    d_x_TD = x_TD.grad if addend_TD is None else x_TD.grad + addend_TD.to(wide)
    rstd_T = torch.rsqrt(x_TD.detach().pow(2).mean(-1) + form.eps)
    return rstd_T, d_x_TD, weight_TD.grad


def make_inputs(num_rows, num_columns, dtype, form, *, device="cpu", weight_dtype=None, scale=1.0):
    """Rows of different size, and a weight around 1 after the form's offset: x, weight, d_y, addend."""
    size_T1 = scale * (0.5 + torch.rand(num_rows, 1, device=device))
    x_TD = (torch.randn(num_rows, num_columns, device=device) * size_T1).to(dtype)
    weight_D = (1.0 - form.weight_offset + 0.3 * torch.randn(num_columns, device=device)).to(weight_dtype or dtype)
    d_y_TD, addend_TD = (torch.randn(num_rows, num_columns, device=device).to(dtype) for _ in range(2))
    return x_TD, weight_D, d_y_TD, addend_TD


def assert_mostly_equal(name, ours, expected, *, share=SHARE):
    """In a narrow dtype values differ from those expected only where rounding is a matter of the last bit of fp32."""
    if expected.dtype is not torch.float32 and ours.numel() >= NUM_FOR_SHARE:
        differing = (ours != expected).double().mean().item()
        assert differing <= share, f"{name}: {differing:.1%} of the values are others, at most {share:.1%} may be"


def assert_value(name, ours, *, plain, truth, dtype):
    """Within the bound; plain PyTorch may have more rows, and stands in where ours has none: it is within any
    multiple of its own error.
    """
    assert ours.dtype is dtype
    assert_within_bound(name, torch.cat([ours, plain[len(ours) :]]), plain=plain, truth=truth, dtype=dtype)


def assert_weight_gradient(ours_D, *, plain_TD, truth_TD, num_rows):
    """Within the bound; plain fp32 and the largest sum are measured on every full group of as many rows, of which
    ours is the first.
    """
    assert ours_D.dtype is torch.float32
    num_groups = len(truth_TD) // num_rows
    plain_GD, truth_GD = (
        terms_TD[: num_groups * num_rows].unflatten(0, (num_groups, num_rows)).sum(1)
        for terms_TD in (plain_TD, truth_TD)
    )
    ours_GD = torch.cat([ours_D[None], plain_GD[1:]])
    assert_within_bound("d_weight", ours_GD, plain=plain_GD, truth=truth_GD, dtype=torch.float32)


def check_against_truth(
    functions,
    num_rows,
    num_columns,
    dtype,
    form,
    *,
    device="cpu",
    weight_dtype=None,
    scale=1.0,
    has_addend=True,
):
    num_measured = max(num_rows, min(NUM_MEASURED_ROWS, NUM_MEASURED_VALUES // num_columns))
    x_TD, weight_D, d_y_TD, addend_TD = make_inputs(
        num_measured, num_columns, dtype, form, device=device, weight_dtype=weight_dtype, scale=scale
    )
    addend_TD = addend_TD if has_addend else None

    ours_x_TD, ours_d_y_TD = poisoned(x_TD[:num_rows]), poisoned(d_y_TD[:num_rows])
    ours_addend_TD = None if addend_TD is None else poisoned(addend_TD[:num_rows])
    ours_weight_D = poisoned(weight_D)
    rstd_T = poisoned(torch.zeros(num_rows, device=device))
    with fresh_memory_is_nan():
        y_TD = functions.rms_norm_forward(ours_x_TD, ours_weight_D, form=form)
        d_x_TD, d_weight_D = functions.rms_norm_backward(
            ours_d_y_TD,
            ours_x_TD,
            ours_weight_D,
            form=form,
            addend_TD=ours_addend_TD,
            needs_weight=True,
            rstd_out=rstd_T,
        )
    for ours, given in ((ours_x_TD, x_TD), (ours_d_y_TD, d_y_TD), (ours_addend_TD, addend_TD)):
        assert ours is None or torch.equal(ours, given[:num_rows])
    assert torch.equal(ours_weight_D, weight_D)
    assert d_weight_D.shape == (num_columns,)

    true_rstd, true_d_x, true_terms = run_formula(d_y_TD, x_TD, weight_D, addend_TD, form, wide=torch.float64)
    plain_rstd, plain_d_x, plain_terms = run_formula(d_y_TD, x_TD, weight_D, addend_TD, form, wide=torch.float32)
    assert_value("rstd", rstd_T, plain=plain_rstd, truth=true_rstd, dtype=torch.float32)

    true_y, plain_y = formula(x_TD.double(), weight_D.double(), form), formula(x_TD, weight_D, form)
    assert_value("y", y_TD, plain=plain_y, truth=true_y, dtype=dtype)
    assert_mostly_equal("y", y_TD, plain_y[:num_rows])

    plain_d_x = plain_d_x.to(dtype)
    assert_value("d_x", d_x_TD, plain=plain_d_x, truth=true_d_x, dtype=dtype)
    true_narrow = true_d_x.to(dtype)[:num_rows]
    plain_share = (plain_d_x[:num_rows] != true_narrow).double().mean().item()
    assert_mostly_equal("d_x", d_x_TD, true_narrow, share=max(2 * plain_share, SHARE))
    assert_weight_gradient(d_weight_D, plain_TD=plain_terms, truth_TD=true_terms, num_rows=num_rows)


def check_in_place(functions, num_rows, num_columns, dtype, form, *, device="cpu"):
    """d_x may take the place of d_y, of the addend, and of both where they are one, and y a place that is given;
    nothing beside it is written.
    """
    x_TD, weight_D, d_y_TD, addend_TD = make_inputs(num_rows, num_columns, dtype, form, device=device)
    expected_TD = functions.rms_norm_forward(x_TD, weight_D, form=form)
    place_TD = poisoned(torch.zeros_like(x_TD))
    assert functions.rms_norm_forward(x_TD, weight_D, form=form, out=place_TD) is place_TD
    assert torch.equal(place_TD, expected_TD)
    assert_nothing_beside(place_TD)
    for place in ("d_y", "addend", "both"):
        inner_TD = poisoned(addend_TD if place == "addend" else d_y_TD)
        ours_d_y_TD, ours_addend_TD = (
            inner_TD if place in (name, "both") else tensor for name, tensor in (("d_y", d_y_TD), ("addend", addend_TD))
        )
        arguments = {"form": form, "needs_weight": True, "addend_TD": ours_addend_TD}
        expected = functions.rms_norm_backward(ours_d_y_TD, x_TD, weight_D, **arguments)
        ours = functions.rms_norm_backward(ours_d_y_TD, x_TD, weight_D, out=inner_TD, **arguments)
        assert ours[0] is inner_TD
        assert all(torch.equal(one, other) for one, other in zip(ours, expected))
        assert_nothing_beside(inner_TD)


def check_rows_of_nan_stay_alone(functions, dtype, form, *, device="cpu"):
    def run():
        rstd_T = torch.empty(21, device=device)
        y_TD = functions.rms_norm_forward(x_TD, weight_D, form=form)
        d_x_TD, d_weight_D = functions.rms_norm_backward(
            d_y_TD, x_TD, weight_D, form=form, addend_TD=addend_TD, needs_weight=True, rstd_out=rstd_T
        )
        return (y_TD, rstd_T, d_x_TD), d_weight_D

    x_TD, weight_D, d_y_TD, addend_TD = make_inputs(21, 33, dtype, form, device=device)
    expected, _ = run()
    # One value of a row is enough to lose it.
    x_TD[13:, 7] = float("nan")
    ours, d_weight_D = run()
    assert all(torch.equal(one[:13], other[:13]) for one, other in zip(ours, expected))
    # Nothing turns a NaN into a number: a run that has lost its values must show it.
    assert all(one[13:].isnan().all() for one in ours)
    assert d_weight_D.isnan().all()


def check_without_the_weight(functions, dtype, form, *, device="cpu"):
    """The gradient of the rows is the same whether that of the weight is asked for or not."""
    x_TD, weight_D, d_y_TD, _ = make_inputs(65, 130, dtype, form, device=device)
    with_weight, without = (
        functions.rms_norm_backward(d_y_TD, x_TD, weight_D, form=form, needs_weight=needs_weight)
        for needs_weight in (True, False)
    )
    assert torch.equal(with_weight[0], without[0])
    assert without[1] is None


def check_without_eps(functions, *, device="cpu"):
    """Rows behind the last one, whose root would be infinite, do not reach the sums."""
    check_against_truth(functions, 7, 33, torch.float32, NormForm(eps=0.0), device=device)


def check_large_and_small_values(functions, dtype, form, *, device="cpu"):
    """Squares beyond the narrow dtype's range are no matter, and where the row is small eps is what is seen."""
    for scale in (1e-3, 300.0):
        check_against_truth(functions, 65, 33, dtype, form, device=device, scale=scale, has_addend=False)


# What takes these is a test of the kernels too, in triton_rms_norm.py.
functions, device = fixtures_of(op, "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_formula_is_that_of_transformers(dtype):
    gemma3 = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    for norm_class, form in (
        (llama.LlamaRMSNorm, LLAMA),
        (gpt_oss.GptOssRMSNorm, GPT_OSS),
        (gemma3.Gemma3RMSNorm, GEMMA),
    ):
        for weight_dtype in {dtype, torch.float32}:
            x_TD, weight_D, _, _ = make_inputs(65, 131, dtype, form, weight_dtype=weight_dtype)
            norm = norm_class(131, eps=form.eps).to(weight_dtype)
            norm.weight.data.copy_(weight_D)
            theirs_TD = norm(x_TD).to(dtype)
            assert torch.equal(formula(x_TD, weight_D, form), theirs_TD)
            assert torch.equal(rms_norm_forward(x_TD, weight_D, form=form), theirs_TD)


@pytest.mark.parametrize("form", FORMS)
def test_in_float64_formula_and_gradient_equal_autograd(form):
    x_TD, weight_D, d_y_TD, addend_TD = make_inputs(7, 33, torch.float64, form)
    y_TD = rms_norm_forward(x_TD, weight_D, form=form)
    gradients = rms_norm_backward(d_y_TD, x_TD, weight_D, form=form, addend_TD=addend_TD, needs_weight=True)
    leaves = [tensor.clone().requires_grad_() for tensor in (x_TD, weight_D)]
    true_y_TD = formula(*leaves, form)
    ((true_y_TD * d_y_TD).sum() + (leaves[0] * addend_TD).sum()).backward()
    for one, true in zip((y_TD, *gradients), (true_y_TD, *(leaf.grad for leaf in leaves))):
        torch.testing.assert_close(one, true, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_equals_the_truth(functions, device, form, dtype):
    for num_rows, num_columns in ((1, 1), (7, 5), (9, 33), (65, 16), (9, 257)):
        check_against_truth(functions, num_rows, num_columns, dtype, form, device=device)


def test_without_an_addend(functions, device):
    check_against_truth(functions, 9, 33, torch.bfloat16, LLAMA, device=device, has_addend=False)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", [LLAMA, GEMMA])
def test_dtype_of_the_weight(functions, device, form, weight_dtype):
    check_against_truth(functions, 9, 33, torch.bfloat16, form, device=device, weight_dtype=weight_dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_large_and_small_values(functions, device, form, dtype):
    check_large_and_small_values(functions, dtype, form, device=device)


def test_without_eps(functions, device):
    check_without_eps(functions, device=device)


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_nan_stay_alone(functions, device, form):
    check_rows_of_nan_stay_alone(functions, torch.bfloat16, form, device=device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_columns", [1, 33, 130, 2049])
def test_the_gradients_given_may_be_overwritten(functions, device, num_columns, dtype):
    check_in_place(functions, 9, num_columns, dtype, LLAMA, device=device)


def test_without_rows(functions, device):
    empty_TD, weight_D = torch.ones(0, 5, device=device), torch.ones(5, device=device)
    with fresh_memory_is_nan():
        y_TD = functions.rms_norm_forward(empty_TD, weight_D, form=LLAMA)
        given = {"form": LLAMA, "addend_TD": empty_TD}
        gradients, without = (
            functions.rms_norm_backward(empty_TD, empty_TD, weight_D, **given, needs_weight=needs_weight)
            for needs_weight in (True, False)
        )
    assert y_TD.shape == gradients[0].shape == without[0].shape == (0, 5)
    assert torch.equal(gradients[1], torch.zeros(5, device=device))
    assert without[1] is None


@pytest.mark.parametrize("form", [LLAMA, GEMMA])
def test_two_runs_are_bit_equal(functions, device, form):
    x_TD, weight_D, d_y_TD, addend_TD = make_inputs(65, 130, torch.bfloat16, form, device=device)
    runs = []
    for _ in range(2):
        y_TD = functions.rms_norm_forward(x_TD, weight_D, form=form)
        given = {"form": form, "addend_TD": addend_TD, "needs_weight": True}
        runs.append((y_TD, *functions.rms_norm_backward(d_y_TD, x_TD, weight_D, **given)))
    assert all(torch.equal(one, other) for one, other in zip(*runs))


def test_no_graph_and_no_wait():
    x_TD, weight_D, d_y_TD, addend_TD = (tensor.requires_grad_() for tensor in make_inputs(7, 5, torch.float32, LLAMA))
    with Watch() as watch:
        y_TD = rms_norm_forward(x_TD, weight_D, form=LLAMA)
        gradients = rms_norm_backward(
            d_y_TD, x_TD, weight_D, form=LLAMA, addend_TD=addend_TD, needs_weight=True, out=d_y_TD.detach()
        )
    assert watch.waits == []
    assert not any(tensor.requires_grad for tensor in (y_TD, *gradients))


REFERENCE_FAULTS = {
    "eps lost": "wide_TD.pow(2).mean(dim=1) {+ form.eps => }",
    "root of the sum": "wide_TD.pow(2).{mean => sum}(dim=1)",
    "offset of the weight lost": "weight_D.to(wide) {+ form.weight_offset => }",
    "normed row not rounded": "if {not form.is_weight_wide => False}:",
    "normed row rounded in the wide form": "if {not form.is_weight_wide => True}:",
    "fp32 lost": "import one_kernel, wide_dtype{ => ; wide_dtype = lambda dtype: dtype}",
    "root taken for a constant": "{(d_normed_TD - normed_TD * along_T[:, None]) => d_normed_TD}",
    "second factor of the root lost": "along_T[:, None]) {* rstd_T[:, None] => }",
    "share along the row is the sum": "(d_normed_TD * normed_TD).{mean => sum}(dim=1)",
    "weight not in the gradient": "d_normed_TD = d_y_TD {* shifted_weight(weight_D, wide, form) => }",
    "weight's gradient by the raw row": "(d_y_TD * {normed_TD => wide_TD}).sum(dim=0)",
    "weight's gradient by the rounded row": "(d_y_TD * normed_TD{ => .to(x_TD.dtype)}).sum(dim=0)",
    "last row not in the weight's gradient": "(d_y_TD * normed_TD){ => [:-1]}.sum(dim=0)",
    "roots not written": "rstd_out.{copy_(rstd_T => zero_(})",
    "addend lost": "{d_x_TD = d_x_TD + addend_TD.to(wide) => pass}",
    "gradient rounded before it is added": "d_x_TD {+ addend_TD.to(wide) => .to(x_TD.dtype) + addend_TD}",
}


def check_every_part(functions, num_columns=130, dtype=torch.bfloat16, *, device="cpu"):
    for form in FORMS:
        check_against_truth(functions, 9, num_columns, dtype, form, device=device)
        check_against_truth(functions, 9, num_columns, torch.float32, form, device=device)
        check_in_place(functions, 9, num_columns, dtype, form, device=device)
    check_without_the_weight(functions, dtype, LLAMA, device=device)
    check_large_and_small_values(functions, dtype, GPT_OSS, device=device)
    check_without_eps(functions, device=device)


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    reference, check_every_part, REFERENCE_FAULTS
)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x_TD": torch.ones(3, 0)}, ShapeError, "no columns"),
        ({"form": None}, OptionError, "NormForm"),
        ({"form": NormForm(eps=-1e-6)}, OptionError, "eps"),
        ({"form": NormForm(eps=float("nan"))}, OptionError, "eps"),
        ({"form": NormForm(weight_offset=float("inf"))}, OptionError, "weight_offset"),
        ({"form": NormForm(is_weight_wide="yes")}, OptionError, "is_weight_wide"),
    ],
)
def test_what_does_not_fit_is_refused(change, error, message):
    given = {"x_TD": torch.ones(3, 4), "weight_D": torch.ones(4), "form": NormForm(), **change}
    with pytest.raises(error, match=message):
        rms_norm_forward(**given)
    with pytest.raises(error, match=message):
        rms_norm_backward(torch.ones(given["x_TD"].shape), **given, needs_weight=True)


def test_whether_the_weight_has_a_gradient_is_a_yes_or_a_no():
    with pytest.raises(OptionError, match="needs_weight"):
        rms_norm_backward(torch.ones(3, 4), torch.ones(3, 4), torch.ones(4), form=LLAMA, needs_weight=None)


def test_wider_rows_than_one_pass_holds_are_refused():
    widest_TD, wider_TD = torch.ones(1, MAX_COLUMNS), torch.ones(1, MAX_COLUMNS + 1)
    rms_norm_forward(widest_TD, widest_TD[0], form=LLAMA)
    with pytest.raises(ShapeError, match="at most 16384"):
        rms_norm_forward(wider_TD, wider_TD[0], form=LLAMA)
    with pytest.raises(ShapeError, match="at most 16384"):
        rms_norm_backward(wider_TD, wider_TD, wider_TD[0], form=LLAMA, needs_weight=True)


def test_output_memory_that_another_program_still_reads_is_refused():
    buffer = torch.ones(120)
    d_y_TD, addend_TD, x_TD, weight_D = (
        buffer[:12].view(3, 4),
        buffer[20:32].view(3, 4),
        buffer[40:52].view(3, 4),
        buffer[60:64],
    )
    inputs, options = (d_y_TD, x_TD, weight_D), {"form": LLAMA, "addend_TD": addend_TD, "needs_weight": True}
    # One element inside d_y, the addend, x, x itself, and the weight.
    for start in (11, 21, 9, 31, 40, 51, 49, 63):
        with pytest.raises(ShapeError, match="shares memory"):
            rms_norm_backward(*inputs, out=buffer[start : start + 12].view(3, 4), **options)
    # The same for the roots that it writes.
    for start in (11, 31, 51, 63):
        with pytest.raises(ShapeError, match="rstd_out shares memory"):
            rms_norm_backward(*inputs, rstd_out=buffer[start : start + 3], **options)
    with pytest.raises(ShapeError, match="out shares memory"):
        rms_norm_backward(*inputs, out=buffer[80:92].view(3, 4), rstd_out=buffer[91:94], **options)
    wide_TD = buffer[:24].view(3, 8)[:, :4]
    with pytest.raises(ShapeError, match="shares memory"):
        rms_norm_backward(*inputs, out=wide_TD, **options)
    for start in (0, 20, 80):
        rms_norm_backward(*inputs, out=buffer[start : start + 12].view(3, 4), **options)
    expanded_TD = torch.ones(4).expand(3, 4)
    with pytest.raises(ShapeError, match="overlap"):
        rms_norm_backward(expanded_TD, x_TD, weight_D, form=LLAMA, needs_weight=True, out=expanded_TD)
