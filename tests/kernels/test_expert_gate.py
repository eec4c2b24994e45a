"""The gate of an expert: formula, gradient and refusals on a CPU by the plain twin; the kernels in the
interpreter and by the compiler.
"""

import pytest
import torch

from lightning_fastft.core.errors import OptionError, ShapeError
from lightning_fastft.kernels.expert_gate import op, reference
from lightning_fastft.kernels.expert_gate.op import gate_backward, gate_forward
from lightning_fastft.kernels.expert_gate.reference import ACTIVATIONS, GateForm, LowRankRows
from tests.support.kernel_harness import NARROW, fixtures_of, planted_faults
from tests.support.truth import Watch, assert_rounded_once, assert_within_bound, fresh_memory_is_nan, one_unit, poisoned

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMS = tuple(GateForm(is_interleaved, activation) for is_interleaved in (False, True) for activation in ACTIVATIONS)
# Errors of a handful of values are luck: plain PyTorch and the largest value are measured on at least so many rows, of
# which ours are the first.
NUM_MEASURED_ROWS = 513


def formula(gate_up_NP, form):
    """What transformers writes, in the dtype of its input."""
    gate, up = (gate_up_NP[..., ::2], gate_up_NP[..., 1::2]) if form.is_interleaved else gate_up_NP.chunk(2, dim=-1)
    if form.activation == "clamped":
        gate = gate.clamp(min=None, max=form.limit)
        up = up.clamp(min=-form.limit, max=form.limit)
        glu = gate * torch.sigmoid(gate * form.alpha)
        return (up + 1) * glu
    if form.activation == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh" if form.activation == "gelu_tanh" else "none") * up


def run_formula(d_act_NF, gate_up_NP, weight_N, form, *, wide):
    """Activation and gradients of weight * (act @ W) through autograd; d_act stands for the gradient behind W."""
    gate_up_NP, weight_N = (tensor.detach().to(wide).requires_grad_() for tensor in (gate_up_NP, weight_N))
    act_NF = formula(gate_up_NP, form)
    (weight_N[:, None] * act_NF * d_act_NF.to(wide)).sum().backward()
    return act_NF.detach(), gate_up_NP.grad, weight_N.grad


def make_inputs(num_rows, num_columns, dtype, form, *, device="cpu", weight_dtype=torch.float32):
    """Values of which some lie on a bound of the clamp, some just beside it."""
    gate_up_NP = (torch.randn(num_rows, 2 * num_columns, device=device) * 3).to(dtype)
    if form.activation == "clamped":
        bound = torch.tensor([form.limit, -form.limit], dtype=dtype, device=device)
        beside = (
            torch.cat([torch.nextafter(bound, bound * 2), torch.nextafter(bound, bound * 0)])
            if dtype is torch.float32
            else bound * 1.03
        )
        special = torch.cat([bound, beside])
        is_special = torch.rand(gate_up_NP.shape, device=device) < 0.2
        gate_up_NP = torch.where(
            is_special, special[torch.randint(len(special), gate_up_NP.shape, device=device)], gate_up_NP
        )
    d_act_NF = torch.randn(num_rows, num_columns, device=device).to(dtype)
    return d_act_NF, gate_up_NP, torch.rand(num_rows, device=device).to(weight_dtype)


def make_addend(num_rows, num_columns, num_ranks, dtype, *, device="cpu"):
    """A low-rank product about as large as the gradient it is added to; None without ranks."""
    if num_ranks is None:
        return None
    low_NR, factor_RF = (
        torch.randn(num_rows, num_ranks, device=device),
        torch.randn(num_ranks, num_columns, device=device),
    )
    return LowRankRows(low_NR.to(dtype), (factor_RF / max(num_ranks, 1) ** 0.5).to(dtype))


def add_product(d_act_NF, addend, *, wide):
    """The gradient with what is added to it, rounded nowhere in between."""
    d_act_NF = d_act_NF.to(wide)
    return d_act_NF if addend is None else d_act_NF + addend.low_NR.to(wide) @ addend.factor_RF.to(wide)


def poisoned_addend(addend, *, num_rows):
    """The first rows of an addend inside of NaN."""
    return None if addend is None else LowRankRows(poisoned(addend.low_NR[:num_rows]), poisoned(addend.factor_RF))


def assert_weight_gradient(ours_N, *, plain_N, truth_N, largest_sum):
    """Within twice the error of plain fp32, or one unit in the last place of the sum of all magnitudes: terms of
    both signs cancel.
    """
    assert ours_N.dtype is torch.float32
    error, plain_error = ((one.double() - truth_N[: len(one)]).abs().max().item() for one in (ours_N, plain_N))
    bound = max(2 * plain_error, one_unit(largest_sum, torch.float32))
    assert error <= bound, f"d_weight: error {error:.3g} above {bound:.3g}"


def check_against_truth(
    functions, num_rows, num_columns, dtype, form, *, device="cpu", weight_dtype=torch.float32, num_ranks=None
):
    num_measured = max(num_rows, NUM_MEASURED_ROWS)
    d_act_NF, gate_up_NP, weight_N = make_inputs(
        num_measured, num_columns, dtype, form, device=device, weight_dtype=weight_dtype
    )
    addend = make_addend(num_measured, num_columns, num_ranks, dtype, device=device)
    true_d_act, plain_d_act = (add_product(d_act_NF, addend, wide=wide) for wide in (torch.float64, torch.float32))
    true_act, true_d_gate_up, true_d_weight = run_formula(true_d_act, gate_up_NP, weight_N, form, wide=torch.float64)
    plain_act, plain_d_gate_up, plain_d_weight = run_formula(
        plain_d_act, gate_up_NP, weight_N, form, wide=torch.float32
    )
    largest_sum = (true_d_act * true_act).abs().sum(dim=1).max()
    addend = poisoned_addend(addend, num_rows=num_rows)
    d_act_NF, gate_up_NP, weight_N = (tensor[:num_rows] for tensor in (d_act_NF, gate_up_NP, weight_N))
    d_act_NF, ours_gate_up_NP, weight_N = poisoned(d_act_NF), poisoned(gate_up_NP), poisoned(weight_N)
    with fresh_memory_is_nan():
        act_NF = functions.gate_forward(ours_gate_up_NP, form=form)
        gradients = functions.gate_backward(
            d_act_NF, ours_gate_up_NP, form=form, weight_N=weight_N, addend=addend, need_act=True
        )
    assert torch.equal(ours_gate_up_NP, gate_up_NP)
    assert act_NF.shape == gradients[1].shape == d_act_NF.shape
    assert gradients[0].shape == gate_up_NP.shape
    assert gradients[2].shape == weight_N.shape
    assert_rounded_once("act", act_NF, plain=plain_act, truth=true_act, dtype=dtype)
    assert_rounded_once("rebuilt act", gradients[1], plain=plain_act, truth=true_act, dtype=dtype)
    assert_rounded_once("d_gate_up", gradients[0], plain=plain_d_gate_up, truth=true_d_gate_up, dtype=dtype)
    assert_weight_gradient(gradients[2], plain_N=plain_d_weight, truth_N=true_d_weight, largest_sum=largest_sum)


def check_rows_of_nan_stay_alone(functions, dtype, form, *, device="cpu", num_ranks=None):
    d_act_NF, gate_up_NP, weight_N = make_inputs(21, 33, dtype, form, device=device)
    addend = make_addend(21, 33, num_ranks, dtype, device=device)
    arguments = {"form": form, "addend": addend, "need_act": True}
    expected = [functions.gate_forward(gate_up_NP, form=form)]
    expected += functions.gate_backward(d_act_NF, gate_up_NP, weight_N=weight_N, **arguments)
    for tensor in (d_act_NF, gate_up_NP, weight_N) if addend is None else (addend.low_NR, gate_up_NP, weight_N):
        tensor[13:] = float("nan")
    ours = [functions.gate_forward(gate_up_NP, form=form)]
    ours += functions.gate_backward(d_act_NF, gate_up_NP, weight_N=weight_N, **arguments)
    assert all(torch.equal(one[:13], other[:13]) for one, other in zip(ours, expected))
    # Nothing turns a NaN into a number: a run that has lost its values must show it.
    assert ours[0][13:].isnan().all()
    assert ours[3][13:].isnan().all()


def check_large_values(functions, dtype, form, *, device="cpu"):
    values = torch.tensor([-80.0, -7.0, -1.0, 0.0, 1.0, 7.0, 80.0], device=device)
    gate_NF, up_NF = (grid.reshape(1, -1) for grid in torch.meshgrid(values, values, indexing="ij"))
    gate_up_NP = (
        torch.stack([gate_NF, up_NF], dim=2).reshape(1, -1)
        if form.is_interleaved
        else torch.cat([gate_NF, up_NF], dim=1)
    )
    gate_up_NP, d_act_NF, weight_N = (
        gate_up_NP.to(dtype),
        torch.ones_like(gate_NF).to(dtype),
        torch.ones(1, device=device),
    )
    truth, plain = (
        run_formula(d_act_NF, gate_up_NP, weight_N, form, wide=wide) for wide in (torch.float64, torch.float32)
    )
    d_gate_up_NP, _, d_weight_N = functions.gate_backward(d_act_NF, gate_up_NP, form=form, weight_N=weight_N)
    assert_within_bound(
        "act", functions.gate_forward(gate_up_NP, form=form), plain=plain[0].to(dtype), truth=truth[0], dtype=dtype
    )
    assert_within_bound("d_gate_up", d_gate_up_NP, plain=plain[1].to(dtype), truth=truth[1], dtype=dtype)
    largest_sum = truth[0].abs().sum()
    assert_weight_gradient(d_weight_N, plain_N=plain[2], truth_N=truth[2], largest_sum=largest_sum)


def check_without_weights(functions, num_rows, num_columns, dtype, form, *, device="cpu", num_ranks=None):
    """Weights of 1 change nothing, but the walk over the columns is another without any."""
    d_act_NF, gate_up_NP, weight_N = make_inputs(num_rows, num_columns, dtype, form, device=device)
    arguments = {
        "form": form,
        "addend": make_addend(num_rows, num_columns, num_ranks, dtype, device=device),
        "need_act": True,
    }
    ones_N = torch.ones_like(weight_N)
    *expected, _ = functions.gate_backward(d_act_NF, gate_up_NP, weight_N=ones_N, **arguments)
    *found, d_weight_N = functions.gate_backward(d_act_NF, gate_up_NP, **arguments)
    assert all(torch.equal(one, other) for one, other in zip(found, expected))
    assert d_weight_N is None


# What takes these is a test of the kernels too, in triton_expert_gate.py.
functions, device = fixtures_of(op, "cpu")
CLAMPED = GateForm(is_interleaved=True, activation="clamped")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_clamp_met", [False, True])
def test_in_float64_formula_and_gradient_equal_autograd(form, is_clamp_met):
    d_act_NF, gate_up_NP, weight_N = make_inputs(7, 33, torch.float32, form, weight_dtype=torch.float64)
    d_act_NF, gate_up_NP = d_act_NF.double(), gate_up_NP.double() * (1 if is_clamp_met else 0.1)
    truth = run_formula(d_act_NF, gate_up_NP, weight_N, form, wide=torch.float64)
    d_gate_up_NP, act_NF, d_weight_N = gate_backward(d_act_NF, gate_up_NP, form=form, weight_N=weight_N, need_act=True)
    ours = (gate_forward(gate_up_NP, form=form), d_gate_up_NP, d_weight_N)
    for one, true in zip(ours, truth):
        torch.testing.assert_close(one, true, rtol=1e-13, atol=1e-13)
    assert torch.equal(act_NF, ours[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_equals_the_truth(functions, device, form, dtype):
    for num_rows, num_columns in ((1, 1), (7, 5), (9, 33), (65, 16), (9, 513)):
        check_against_truth(functions, num_rows, num_columns, dtype, form, device=device)


@pytest.mark.parametrize("form", [CLAMPED._replace(limit=1.5, alpha=0.7), CLAMPED._replace(limit=0.0, alpha=1.0)])
def test_other_limits_and_steepness(functions, device, form):
    check_against_truth(functions, 9, 33, torch.float32, form, device=device)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float16])
def test_dtype_of_the_routing_weight(functions, device, weight_dtype):
    check_against_truth(functions, 9, 33, NARROW, GateForm(), device=device, weight_dtype=weight_dtype)


@pytest.mark.parametrize("form", FORMS)
def test_in_float64_the_low_rank_product_equals_autograd(form):
    d_act_NF, gate_up_NP, weight_N = make_inputs(7, 33, torch.float32, form, weight_dtype=torch.float64)
    d_act_NF, gate_up_NP, addend = d_act_NF.double(), gate_up_NP.double(), make_addend(7, 33, 5, torch.float64)
    _, *truth = run_formula(
        add_product(d_act_NF, addend, wide=torch.float64), gate_up_NP, weight_N, form, wide=torch.float64
    )
    d_gate_up_NP, _, d_weight_N = gate_backward(d_act_NF, gate_up_NP, form=form, weight_N=weight_N, addend=addend)
    for one, true in zip((d_gate_up_NP, d_weight_N), truth):
        torch.testing.assert_close(one, true, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_large_values_stay_finite_and_true(functions, device, form, dtype):
    check_large_values(functions, dtype, form, device=device)


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_nan_stay_alone(functions, device, form):
    for num_ranks in (None, 5):
        check_rows_of_nan_stay_alone(functions, torch.bfloat16, form, device=device, num_ranks=num_ranks)


@pytest.mark.parametrize("shape", [(0, 0), (0, 6), (3, 0)])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_without_rows_or_columns(functions, device, shape, is_interleaved):
    num_rows, num_columns = shape
    d_act_NF, weight_N = torch.ones(shape, device=device), torch.ones(num_rows, device=device)
    gate_up_NP, form = torch.ones(num_rows, 2 * num_columns, device=device), GateForm(is_interleaved)
    addend = make_addend(num_rows, num_columns, 3, torch.float32, device=device)
    given = {"form": form, "weight_N": weight_N}
    with fresh_memory_is_nan():
        act_NF = functions.gate_forward(gate_up_NP, form=form)
        gradients = functions.gate_backward(d_act_NF, gate_up_NP, **given, need_act=True)
        d_gate_up_NP, _, d_weight_N = functions.gate_backward(d_act_NF, gate_up_NP, **given, addend=addend)
    assert act_NF.shape == gradients[1].shape == shape
    assert gradients[0].shape == d_gate_up_NP.shape == gate_up_NP.shape
    assert torch.equal(gradients[2], torch.zeros_like(weight_N))
    assert torch.equal(d_weight_N, torch.zeros_like(weight_N))


def test_without_weight_it_counts_as_one_and_has_no_gradient(functions, device):
    d_act_NF, gate_up_NP, weight_N = make_inputs(9, 33, torch.bfloat16, CLAMPED, device=device)
    d_gate_up_NP, act_NF, d_weight_N = functions.gate_backward(d_act_NF, gate_up_NP, form=CLAMPED)
    expected, *_ = functions.gate_backward(d_act_NF, gate_up_NP, form=CLAMPED, weight_N=torch.ones_like(weight_N))
    assert torch.equal(d_gate_up_NP, expected)
    assert act_NF is d_weight_N is None


def test_no_graph_and_no_wait():
    d_act_NF, gate_up_NP, weight_N = make_inputs(7, 5, torch.float32, GateForm())
    gate_up_NP.requires_grad_()
    with Watch() as watch:
        act_NF = gate_forward(gate_up_NP, form=GateForm())
        gradients = gate_backward(
            d_act_NF,
            gate_up_NP,
            form=GateForm(),
            weight_N=weight_N,
            addend=make_addend(7, 5, 3, torch.float32),
            need_act=True,
        )
    assert watch.waits == []
    assert not any(tensor.requires_grad for tensor in (act_NF, *gradients))


REFERENCE_FAULTS = {
    "limit on the wrong side of the gate": "gate_NF.clamp({max => min}=form.limit)",
    "up clamped on one side": "up_NF.clamp({min=-form.limit, => } max=form.limit)",
    "one not added": "max=form.limit) {+ 1 => }",
    "steepness lost": "return gate_NF {* form.alpha => } if",
    "slope of the steepness lost": "return slope_NF {* form.alpha => } if",
    "columns swapped": "return gate_up_NP[:, {::2], gate_up_NP[:, 1 => 1::2], gate_up_NP[:,}::2]",
    "halves taken for pairs": "if{ =>  not} form.is_interleaved:",
    "gradient beyond the bound": "{torch.where(is_gate_inside_NF, d_gate_NF, 0.0) => d_gate_NF}",
    "gradient on the bound as in another torch": "raw_gate_NF <= limit if{ =>  not} CLAMP_PASSES_BOUND",
    "gradient of up on its bound as in another torch": "size_NF <= limit if{ =>  not} CLAMP_PASSES_BOUND",
    "weight not applied": "d_act_NF = d_act_NF {* weight_N.to(wide)[:, None] => }",
    "sum after the weight": "d_weight_N = (d_act_NF *{ => weight_N.to(wide)[:, None] *} act_NF)",
    "cube lost": "(1 + {3.0 * => } TANH_CUBE",
    "low-rank product lost": "d_act_NF +{ => 0 *} addend.low_NR",
    "low-rank product rounded": "d_act_NF +{ => (} addend.low_NR.to(wide) @ addend.factor_RF.to(wide){ => ).to(dtype)}",
    "sum with the low-rank product rounded": (
        "{ => (}d_act_NF + addend.low_NR.to(wide) @ addend.factor_RF.to(wide){ => ).to(dtype).to(wide)}"
    ),
    "fp32 lost": "import one_kernel, wide_dtype{ => ; wide_dtype = lambda dtype: dtype}",
}


def check_every_part(functions, num_columns=130, dtype=torch.bfloat16):
    for form in FORMS:
        check_against_truth(functions, 9, num_columns, dtype, form)
        check_against_truth(functions, 9, num_columns, torch.float32, form)
        check_against_truth(functions, 9, num_columns, dtype, form, num_ranks=5)


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    reference, check_every_part, REFERENCE_FAULTS
)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"gate_up_NP": torch.ones(3, 9)}, ShapeError, "even"),
        ({"addend": (torch.ones(3, 2), torch.ones(2, 4))}, OptionError, "LowRankRows"),
        ({"form": None}, OptionError, "GateForm"),
        ({"form": GateForm(activation="relu")}, OptionError, "'silu', 'gelu'"),
        ({"form": GateForm(is_interleaved=None)}, OptionError, "is_interleaved"),
        ({"form": GateForm(activation="clamped", limit=-1.0)}, OptionError, "limit"),
        ({"form": GateForm(activation="clamped", limit=None)}, OptionError, "limit"),
        ({"form": GateForm(activation="clamped", alpha=float("nan"))}, OptionError, "alpha"),
    ],
)
def test_impossible_arguments_are_refused(change, error, message):
    arguments = {
        "d_act_NF": torch.ones(3, 4),
        "gate_up_NP": torch.ones(3, 8),
        "weight_N": torch.ones(3),
        "form": GateForm(),
        **change,
    }
    with pytest.raises(error, match=message):
        gate_backward(**arguments)
    if set(change) & {"gate_up_NP", "form"}:
        with pytest.raises(error, match=message):
            gate_forward(**{name: value for name, value in arguments.items() if name in ("gate_up_NP", "form")})
