"""Norm and rotation of q and k: formula, gradient and refusals on a CPU by the plain twin; the kernels in the
interpreter and by the compiler.
"""

import importlib

import pytest
import torch

from lightning_fastft.core.errors import OptionError, ShapeError
from lightning_fastft.kernels.qk_rope import op, reference
from lightning_fastft.kernels.qk_rope.op import qk_rope_backward, qk_rope_heads
from lightning_fastft.kernels.qk_rope.reference import Heads, Rope, RopeForm
from tests.support.children import thinned
from tests.support.kernel_harness import NARROW, fixtures_of, planted_faults
from tests.support.truth import (
    Watch,
    assert_rounded_once,
    assert_within_bound,
    fresh_memory_is_nan,
    one_unit,
    poisoned,
    relative_error,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LLAMA = RopeForm(4, 2, 16)
QWEN3 = RopeForm(3, 1, 16, has_norm=True, eps=1e-2)
GEMMA = RopeForm(2, 2, 20, has_norm=True, weight_offset=1.0, is_weight_wide=True)
GLM4 = RopeForm(5, 2, 24, rotary_width=12, is_interleaved=True)
PARTIAL = RopeForm(3, 2, 24, rotary_width=10, has_norm=True, weight_offset=0.25)
INTERLEAVED = RopeForm(5, 1, 12, rotary_width=8, has_norm=True, is_weight_wide=True, is_interleaved=True)
FORMS = (LLAMA, QWEN3, GEMMA, GLM4, PARTIAL, INTERLEAVED)
# Each key head with two, three, one, two, two and five query heads.
SHARED_FORMS = (LLAMA, QWEN3, GEMMA, GLM4._replace(num_heads=4), PARTIAL._replace(num_heads=4), INTERLEAVED)
# Every second form in fp32, the others in 16 bits.
FORM_AND_DTYPE = thinned(FORMS, DTYPES, keep=lambda form, dtype: form % 2 == min(dtype, 1))
WIDTHS = (2, 64, 80, 96, 128, 192, 256)
# Errors of a handful of values are luck: plain PyTorch and the largest value are measured on at least so many tokens,
# of which ours are the first.
NUM_MEASURED_TOKENS = 257
# A sum over tokens is one value only: plain PyTorch is measured on up to so many groups of as many tokens.
NUM_GROUPS = 32


def norm(x, weight_W, form, hat_dtype):
    """What transformers writes, in the dtype of its input; the normed value is rounded to hat_dtype where the
    form rounds it.
    """
    hat = x.to(torch.promote_types(x.dtype, torch.float32))
    hat = hat * torch.rsqrt(hat.pow(2).mean(-1, keepdim=True) + form.eps)
    if form.is_weight_wide:
        return (hat * (form.weight_offset + weight_W.to(hat.dtype))).to(x.dtype)
    return (form.weight_offset + weight_W.to(x.dtype)) * hat.to(hat_dtype).to(x.dtype)


def rotate(x, cos_TW, sin_TW, form):
    """What transformers writes, in the dtype of its input."""
    width = form.num_rotated
    cos, sin = cos_TW[:, None], sin_TW[:, None]
    rotated, rest = x[..., :width], x[..., width:]
    if form.is_interleaved:
        cos, sin = (angle[..., : width // 2].repeat_interleave(2, dim=-1) for angle in (cos, sin))
        half = torch.stack((-rotated[..., 1::2], rotated[..., 0::2]), dim=-1).flatten(-2)
    else:
        half = torch.cat((-rotated[..., width // 2 :], rotated[..., : width // 2]), dim=-1)
    return torch.cat([(rotated * cos + half * sin).to(x.dtype), rest], dim=-1)


def formula(qkv_TC, cos_TW, sin_TW, q_weight_W, k_weight_W, form, *, hat_dtype=None):
    num_q, num_k = form.num_heads * form.head_width, form.num_kv_heads * form.head_width
    q_TC, k_TC, v_TC = qkv_TC.split([num_q, num_k, num_k], dim=1)
    outputs = []
    for x_TC, weight_W in ((q_TC, q_weight_W), (k_TC, k_weight_W)):
        x_THW = x_TC.reshape(len(x_TC), x_TC.shape[1] // form.head_width, form.head_width)
        if form.has_norm:
            x_THW = norm(x_THW, weight_W, form, hat_dtype or x_THW.dtype)
        outputs.append(rotate(x_THW, cos_TW, sin_TW, form).flatten(1))
    return torch.cat([*outputs, v_TC], dim=1)


def run_formula(inputs, form, *, dtype):
    """Output and gradients through autograd; weights are None where there is no norm."""
    d_qkv_TC, qkv_TC, cos_TW, sin_TW, *weights = (None if one is None else one.detach().to(dtype) for one in inputs)
    leaves = [one.requires_grad_() for one in (qkv_TC, *weights) if one is not None]
    out_TC = formula(qkv_TC, cos_TW, sin_TW, *weights, form)
    gradients = torch.autograd.grad(out_TC, leaves, d_qkv_TC)
    return (out_TC.detach(), *gradients)


def make_inputs(num_tokens, form, dtype, *, device="cpu", angle_dtype=None, weight_dtype=None):
    """Gradient, raw rows, cos, sin, weights. Angles carry a factor and differ between the halves; what an
    interleaved form must not read is NaN.
    """
    d_qkv_TC, qkv_TC = (torch.randn(num_tokens, form.num_columns, device=device).to(dtype) for _ in range(2))
    angle_TW = torch.rand(num_tokens, form.num_rotated, device=device) * 6.3
    cos_TW, sin_TW = ((1.2 * angle).to(angle_dtype or dtype) for angle in (angle_TW.cos(), angle_TW.sin()))
    if form.is_interleaved:
        cos_TW[:, form.num_rotated // 2 :] = sin_TW[:, form.num_rotated // 2 :] = float("nan")
    weights = [None, None]
    if form.has_norm:
        weights = [(torch.rand(form.head_width, device=device) + 0.5).to(weight_dtype or dtype) for _ in range(2)]
    return d_qkv_TC, qkv_TC * 3, cos_TW, sin_TW, *weights


def heads_of(num_tokens, num_kv_heads, num_heads):
    """Gradients of so many heads of four columns."""
    return Heads(*(torch.ones(num_tokens, count, 4) for count in (num_heads, num_kv_heads, num_kv_heads)))


def first_tokens(inputs, num_tokens):
    return *(one[:num_tokens] for one in inputs[:4]), *inputs[4:]


def split_heads(rows_TC, form):
    """Gradients of the heads side by side as three tensors."""
    return Heads(*rows_TC.unflatten(1, (-1, form.head_width)).split(form.head_counts, dim=1))


def run_ours(functions, inputs, form, **arguments):
    """Output, side by side, and gradients of ours."""
    d_qkv_TC, qkv_TC, *others = inputs
    rope = Rope(*others, form)
    heads = functions.qk_rope_heads(qkv_TC, rope)
    assert all(head.is_contiguous() for head in heads)
    gradients = functions.qk_rope_backward(
        split_heads(d_qkv_TC, form),
        qkv_TC if form.has_norm else None,
        rope,
        needs_weight=form.has_norm,
        **arguments,
    )
    return torch.cat(heads, dim=1).flatten(1), *gradients


def weight_gradient_errors(measured, num_tokens, form):
    """Errors of plain fp32 in the gradients of q's and of k's weight, the largest over groups of so many tokens."""
    num_groups = min(len(measured[0]) // max(num_tokens, 1), NUM_GROUPS)
    num_rows = num_groups * num_tokens
    if num_rows == 0:
        return []
    sums = []
    for dtype in (torch.float32, torch.float64):
        d_qkv_TC, qkv_TC, cos_TW, sin_TW, *weights = (one.detach().to(dtype) for one in measured)
        # A weight of its own for each token: its gradients are summed over the tokens of a group.
        weights = [one.expand(num_rows, 1, -1).clone().requires_grad_() for one in weights]
        out_TC = formula(qkv_TC[:num_rows], cos_TW[:num_rows], sin_TW[:num_rows], *weights, form)
        gradients = torch.autograd.grad(out_TC, weights, d_qkv_TC[:num_rows])
        sums.append([one.view(num_groups, num_tokens, -1).sum(dim=1) for one in gradients])
    return [(plain - truth).abs().max().item() for plain, truth in zip(*sums)]


def assert_weight_gradient(name, ours_W, *, plain_error, truth_W, largest_sum):
    """Within twice the error of plain fp32, or one unit in the last place of the sum of all magnitudes: terms of
    both signs cancel.
    """
    assert ours_W.dtype is torch.float32
    assert ours_W.shape == truth_W.shape
    error = (ours_W.double() - truth_W).abs().max().item()
    bound = max(2 * plain_error, one_unit(largest_sum, torch.float32))
    assert error <= bound, f"{name}: error {error:.3g} above {bound:.3g}"


def largest_weight_sums(inputs, form):
    """Per weight, the largest sum of magnitudes that its gradient adds: every token and head gives one term, of
    two products.
    """
    d_qkv_TC, qkv_TC, cos_TW, sin_TW, *_ = (None if one is None else one.double() for one in inputs)
    positive_TW = cos_TW.abs(), -sin_TW.abs()
    ones_W = torch.ones(form.head_width, dtype=torch.float64, device=qkv_TC.device)
    # Turned by an angle with cos >= 0 and sin <= 0, magnitudes add in the first columns; the second ones are as large.
    plain_form = form._replace(has_norm=False)
    d_TC = formula(d_qkv_TC.abs(), *positive_TW, None, None, plain_form).abs()
    hat_TC = formula(
        qkv_TC, torch.ones_like(cos_TW), torch.zeros_like(sin_TW), ones_W, ones_W, form._replace(weight_offset=0.0)
    ).abs()
    terms_THW = (d_TC * hat_TC)[:, : form.num_qk_columns].unflatten(1, (-1, form.head_width))
    return terms_THW[:, : form.num_heads].sum((0, 1)).max(), terms_THW[:, form.num_heads :].sum((0, 1)).max()


def check_against_truth(functions, num_tokens, form, dtype, **kinds):
    measured = make_inputs(max(num_tokens * (2 if form.has_norm else 1), NUM_MEASURED_TOKENS), form, dtype, **kinds)
    true_out, true_d_raw, *_ = run_formula(measured, form, dtype=torch.float64)
    plain_out, plain_d_raw, *_ = run_formula(measured, form, dtype=torch.float32)
    rounded_out = true_out
    if form.has_norm and not form.is_weight_wide:
        # The forward rounds where transformers does, before the weight: it is measured by transformers' arithmetic, and
        # repeats that one rounding.
        plain_out, *_ = run_formula(measured, form, dtype=dtype)
        rounded_out = formula(*(one.double() for one in measured[1:]), form, hat_dtype=dtype)
    inputs = first_tokens(measured, num_tokens)
    kept = [None if one is None else one.clone() for one in inputs]
    inputs = tuple(None if one is None else poisoned(one) for one in inputs)
    with fresh_memory_is_nan():
        out_TC, d_raw_TC, *d_weights = run_ours(functions, inputs, form)
    assert all(one is None or torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(inputs, kept))
    assert_rounded_once("out", out_TC, plain=plain_out, truth=true_out, rounded_truth=rounded_out, dtype=dtype)
    assert_rounded_once("d_raw", d_raw_TC, plain=plain_d_raw, truth=true_d_raw, rounded_truth=true_d_raw, dtype=dtype)
    for one, source in ((out_TC, kept[1]), (d_raw_TC, kept[0])):
        assert torch.equal(one[:, form.num_qk_columns :], source[:, form.num_qk_columns :])
    if not form.has_norm:
        assert d_weights == [None, None]
        return
    true_weights = run_formula(kept, form, dtype=torch.float64)[2:]
    errors = weight_gradient_errors(measured, num_tokens, form)
    for name, ours, error, truth, largest in zip(
        "qk", d_weights, errors, true_weights, largest_weight_sums(kept, form)
    ):
        assert_weight_gradient(f"d_{name}_weight", ours, plain_error=error, truth_W=truth, largest_sum=largest)


def check_gates(functions, num_tokens, form, dtype, **kinds):
    """Gates behind query heads are neither read nor written, and all other columns are as without gates."""
    _, qkv_TC, *others = make_inputs(num_tokens, form, dtype, **kinds)
    gated, num_queries = form._replace(has_gate=True), form.num_heads * form.head_width

    def with_gates(rows_TC, value):
        queries = rows_TC[:, :num_queries].unflatten(1, (form.num_heads, form.head_width))
        queries = torch.stack([queries, torch.full_like(queries, value)], dim=2)
        return torch.cat([queries.flatten(1), rows_TC[:, num_queries:]], dim=1)

    raw_TC = with_gates(qkv_TC, float("nan"))
    out_TC = poisoned(with_gates(torch.full_like(qkv_TC, float("nan")), 7.0))
    heads, expected_heads = (
        functions.qk_rope_heads(rows, Rope(*others, each))
        for rows, each in ((poisoned(raw_TC), gated), (poisoned(qkv_TC), form))
    )
    d_heads = Heads(*(torch.randn(head.shape, device=head.device).to(dtype) for head in heads))
    found, expected = (
        functions.qk_rope_backward(d_heads, poisoned(rows), Rope(*others, each), needs_weight=form.has_norm, out=out)
        for rows, each, out in ((raw_TC, gated, out_TC), (qkv_TC, form, None))
    )
    bound = {torch.float32: 1e-6}.get(dtype, 2**-8)
    pairs = [*zip(heads, expected_heads), (found[0], with_gates(expected[0], 7.0))]
    pairs += zip(found[1:], expected[1:]) if form.has_norm else ()
    assert found[0] is out_TC
    assert all(relative_error(one, other) <= bound for one, other in pairs)


def check_shares(functions, num_tokens, form, dtype, **kinds):
    """Shares of key and value heads are added up without a rounding in between."""
    _, *others = make_inputs(max(num_tokens, NUM_MEASURED_TOKENS), form, dtype, **kinds)
    shape = (len(others[0]), form.num_heads, form.head_width)
    shares = [torch.randn(shape, device=others[0].device).to(dtype) for _ in range(3)]

    def measure(wide, num_rows=None):
        d_q_THW, *shared = (d.to(wide) for d in shares)
        joint_TC = torch.cat(
            [d_q_THW, *(d.unflatten(1, (form.num_kv_heads, -1)).sum(dim=2) for d in shared)], dim=1
        ).flatten(1)
        return run_formula(first_tokens((joint_TC, *others), num_rows), form, dtype=wide)[1:]

    (true_d_raw, *_), (plain_d_raw, *_) = measure(torch.float64), measure(torch.float32)
    raw_TC, cos_TW, sin_TW = (one[:num_tokens] for one in others[:3])
    rope = Rope(cos_TW, sin_TW, *others[3:], form)
    given = Heads(*(poisoned(d[:num_tokens].flatten(1)).unflatten(1, (-1, form.head_width)) for d in shares))
    with fresh_memory_is_nan():
        d_raw_TC, *d_weights = functions.qk_rope_backward(given, poisoned(raw_TC), rope, needs_weight=form.has_norm)
    assert_rounded_once("d_raw", d_raw_TC, plain=plain_d_raw, truth=true_d_raw, rounded_truth=true_d_raw, dtype=dtype)
    if form.has_norm:
        for ours_W, truth_W in zip(d_weights, measure(torch.float64, num_tokens)[1:], strict=True):
            torch.testing.assert_close(ours_W, truth_W.float(), rtol=1e-5, atol=1e-5 * truth_W.abs().max().item())


def check_rows_of_nan_stay_alone(functions, form, dtype, *, device="cpu"):
    inputs = make_inputs(5, form, dtype, device=device)
    expected = run_ours(functions, inputs, form)
    # Values of v are copied, and NaN in a gradient or a raw row must not be turned into a number.
    inputs[0][2], inputs[1][2] = float("nan"), float("nan")
    ours = run_ours(functions, inputs, form)
    for one, other in zip(ours[:2], expected[:2]):
        assert torch.equal(one[:2], other[:2])
        assert torch.equal(one[3:], other[3:])
        assert one[2].isnan().all()
    if form.has_norm:
        assert ours[2].isnan().all()
        assert ours[3].isnan().all()


def check_without_eps(functions, *, device="cpu"):
    """Heads that fill a tile's end have a mean square of 0: without eps they are divided by 0, which no sum may see."""
    check_against_truth(functions, 3, QWEN3._replace(eps=0.0), torch.float32, device=device)


# What takes these is a test of the kernels too, in triton_qk_rope.py.
functions, device = fixtures_of(op, "cpu")


def test_memory_is_given_for_a_form_with_gates_and_only_then():
    form = LLAMA._replace(has_gate=True)
    raw, angle = torch.ones(3, form.num_columns), torch.ones(3, 16)
    with pytest.raises(ShapeError, match="with gates"):
        qk_rope_heads(raw[:, 16:], Rope(angle, angle, None, None, form))
    gradients = Heads(*(torch.ones(3, count, 16) for count in form.head_counts))
    for each, out in ((form, None), (LLAMA, torch.ones(3, LLAMA.num_columns))):
        with pytest.raises(OptionError, match="out"):
            qk_rope_backward(gradients, None, Rope(angle, angle, None, None, each), needs_weight=False, out=out)


@pytest.mark.parametrize("form", FORMS)
def test_in_float64_formula_and_gradient_equal_autograd(form):
    inputs = make_inputs(7, form, torch.float64)
    ours = run_ours(op, inputs, form)
    for one, true in zip(ours, run_formula(inputs, form, dtype=torch.float64)):
        torch.testing.assert_close(one, true, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("form", "dtype"), FORM_AND_DTYPE)
def test_every_form_equals_the_truth(functions, device, form, dtype):
    for num_tokens in (1, 3):
        check_against_truth(functions, num_tokens, form, dtype, device=device)


# Any two of width, whole or part of it rotated, norm and order of pairs meet.
@pytest.mark.parametrize(
    ("head_width", "is_whole", "has_norm", "is_interleaved"),
    thinned(
        WIDTHS,
        *[(False, True)] * 3,
        keep=lambda _, is_whole, has_norm, is_interleaved: is_whole ^ has_norm ^ is_interleaved,
    ),
)
def test_width_of_a_head(functions, device, head_width, is_whole, has_norm, is_interleaved):
    rotary_width = head_width if is_whole else max(head_width // 4 * 2, 2)
    form = RopeForm(2, 1, head_width, rotary_width, has_norm=has_norm, is_interleaved=is_interleaved)
    check_against_truth(functions, 2, form, NARROW, device=device)


@pytest.mark.parametrize(
    ("form", "heads"),
    thinned(
        (LLAMA, QWEN3, INTERLEAVED),
        ((1, 1), (1, 3), (7, 2), (33, 17)),
        keep=lambda form, heads: form == heads % 3 or (form, heads) == (1, 3),
    ),
)
def test_number_of_heads(functions, device, form, heads):
    num_heads, num_kv_heads = heads
    form = form._replace(num_heads=num_heads, num_kv_heads=num_kv_heads)
    check_against_truth(functions, 2, form, NARROW, device=device)


@pytest.mark.parametrize(
    ("form", "kinds"),
    [
        (LLAMA, {"angle_dtype": torch.float32}),
        *((form, {"weight_dtype": dtype}) for form in (QWEN3, GEMMA) for dtype in (torch.float32, torch.float16)),
    ],
)
def test_dtypes_of_angles_and_weights(functions, device, form, kinds):
    check_against_truth(functions, 2, form, torch.bfloat16, device=device, **kinds)


def test_without_eps_nothing_is_divided_by_zero(functions, device):
    check_without_eps(functions, device=device)


@pytest.mark.parametrize("form", SHARED_FORMS)
def test_shares_of_key_and_value_heads_are_added_up(functions, device, form):
    check_shares(functions, 2, form, NARROW, device=device)


@pytest.mark.parametrize("form", FORMS)
def test_without_tokens(functions, device, form):
    with fresh_memory_is_nan():
        out_TC, d_raw_TC, *d_weights = run_ours(functions, make_inputs(0, form, NARROW, device=device), form)
    assert out_TC.shape == d_raw_TC.shape == (0, form.num_columns)
    for one in d_weights:
        assert torch.equal(one, torch.zeros(form.head_width, device=device)) if form.has_norm else one is None


@pytest.mark.parametrize("form", [QWEN3, PARTIAL])
def test_weights_have_no_gradient_where_none_is_asked_for(functions, device, form):
    d_qkv_TC, qkv_TC, *others = make_inputs(5, form, NARROW, device=device)
    arguments = (split_heads(d_qkv_TC, form), qkv_TC, Rope(*others, form))
    with_weights, without = (
        functions.qk_rope_backward(*arguments, needs_weight=needs_weight) for needs_weight in (True, False)
    )
    assert without[1] is without[2] is None
    assert torch.equal(without[0], with_weights[0])


def test_without_a_norm_the_raw_rows_are_not_read():
    d_qkv_TC, qkv_TC, *others = make_inputs(7, LLAMA, torch.bfloat16)
    first, second = (
        qk_rope_backward(split_heads(d_qkv_TC, LLAMA), raw, Rope(*others, LLAMA), needs_weight=False)[0]
        for raw in (None, qkv_TC * float("nan"))
    )
    assert torch.equal(first, second)


def test_no_graph_and_no_wait():
    inputs = make_inputs(7, QWEN3, torch.float32)
    for one in (inputs[1], *inputs[4:]):
        one.requires_grad_()
    with Watch() as watch:
        ours = run_ours(op, inputs, QWEN3)
    assert watch.waits == []
    assert not any(tensor.requires_grad for tensor in ours)


# Model, form, norm class, dtype of cos and sin as its rotary embedding gives them to bf16 states.
MODELS = (
    ("llama", RopeForm(4, 2, 16), None, torch.bfloat16),
    ("qwen3", RopeForm(4, 2, 16, has_norm=True), "Qwen3RMSNorm", torch.bfloat16),
    (
        "gemma3",
        RopeForm(4, 2, 16, has_norm=True, weight_offset=1.0, is_weight_wide=True),
        "Gemma3RMSNorm",
        torch.bfloat16,
    ),
    ("glm4", RopeForm(4, 2, 16, rotary_width=8, is_interleaved=True), None, torch.bfloat16),
    ("ernie4_5", RopeForm(4, 2, 16, is_interleaved=True), None, torch.float32),
)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "form", "norm_name", "angle_dtype"), MODELS)
def test_values_and_gradients_are_those_of_transformers(model, form, norm_name, angle_dtype):
    modeling = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    num_tokens, dtype = 67, torch.bfloat16
    d_qkv_TC, qkv_TC, _, _, *weights = make_inputs(num_tokens, form, dtype)
    angle_TW = torch.outer(torch.arange(num_tokens), 100.0 ** -torch.linspace(0, 1, form.num_rotated // 2)).repeat(1, 2)
    cos_TW, sin_TW = angle_TW.cos().to(angle_dtype), angle_TW.sin().to(angle_dtype)
    inputs = (d_qkv_TC, qkv_TC, cos_TW, sin_TW, *weights)

    leaf_TC = qkv_TC.clone().requires_grad_()
    heads_HTW = leaf_TC.unflatten(1, (-1, form.head_width)).transpose(0, 1)[None]
    q, k, v = heads_HTW.split([form.num_heads, form.num_kv_heads, form.num_kv_heads], dim=1)
    norms = (
        [getattr(modeling, norm_name)(form.head_width, eps=form.eps).to(dtype) for _ in range(2)] if norm_name else []
    )
    if norms:
        for module, weight_W in zip(norms, weights):
            module.weight.data.copy_(weight_W)
        q, k = norms[0](q), norms[1](k)
    q, k = modeling.apply_rotary_pos_emb(q, k, cos_TW[None], sin_TW[None])
    plain_TC = torch.cat([q, k, v], dim=1)[0].transpose(0, 1).flatten(1)
    plain_TC.backward(d_qkv_TC)
    # The plain formula of all other tests is the one of transformers, to the bit.
    assert torch.equal(formula(*inputs[1:], form), plain_TC)

    true_out, true_d_raw, *true_d_weights = run_formula(inputs, form, dtype=torch.float64)
    out_TC, d_raw_TC, *d_weights = run_ours(op, inputs, form)
    assert_within_bound("out", out_TC, plain=plain_TC, truth=true_out, dtype=dtype)
    assert_within_bound("d_raw", d_raw_TC, plain=leaf_TC.grad, truth=true_d_raw, dtype=dtype)
    for module, ours_W, truth_W in zip(norms, d_weights, true_d_weights):
        assert_within_bound("d_weight", ours_W, plain=module.weight.grad, truth=truth_W, dtype=dtype)


REFERENCE_FAULTS = {
    "turned the wrong way": "cos_second, {-sin_first, => sin_first, -} sin_second, form)",
    "gradient turned like the values": "cos_second, {sin_second, -sin_first => -sin_first, sin_second}, form)",
    "gradient turned by the other column's angle": (
        "cos_second, {sin_second, -sin_first => sin_first, -sin_second}, form)"
    ),
    "halves taken for neighbours": "if{ =>  not} form.is_interleaved: return x_THW",
    "second half of the angles read by neighbours": "slice(num_pairs{ => , None}) if rope.form.is_interleaved",
    "first half of the angles read by halves": "else slice(num_pairs{, None => })",
    "columns that are not rotated are lost": "mixed_rest.{copy_(rest => zero_(})",
    "eps lost": "{+ form.eps => })",
    "mean over the rotated columns": "x_THW{ => [..., : form.num_rotated]}.square().mean(",
    "offset of the weight lost": "{+ form.weight_offset => }",
    "weights swapped": "{q_weight_W => k_weight_W}.to(wide).expand(form.num_heads",
    "not rounded before the weight": "{if not form.is_weight_wide: x_THW = x_THW.to(dtype).to(wide) => }",
    "always rounded before the weight": "if {not form.is_weight_wide => True}:",
    "gradient without the norm's mean": ".mean(dim=2, keepdim=True){ => * 0}) if out",
    "gradient without the norm's scale": "d_THW = {scale_T * => } (d_THW -",
    "weight not applied to the gradient": "d_THW = d_THW * {_head_weights(rope, wide) => 1}",
    "gradient of the weight from raw values": "(d_THW * x_THW{ => / scale_T}).sum(dim=0)",
    "last head's weight gradient lost": "[: form.num_heads{ => - 1}].sum(dim=0)",
    "values not copied": "v_TGW = rows_TC[:, form.num_qk_columns :].unflatten(1, (form.num_kv_heads, form.head_width)){ => * 0}",
    "gradient of the values lost": "[d_THW[:, form.num_heads :], d_v_TGW{ => * 0}]",
    "first share only": "{.sum(dim=2) => [:, :, 0]} for d in",
    "shares of other heads": ".unflatten(1, ({form.num_kv_heads, -1)).sum(dim=2 => -1, form.num_kv_heads)).sum(dim=1})",
    "shares rounded in between": "d.{to(wide). => }unflatten",
    "fp32 lost": "import one_kernel, wide_dtype{ => ; wide_dtype = lambda dtype: dtype}",
}


def check_every_part(functions):
    for form in FORMS:
        check_against_truth(functions, 7, form, torch.float16)
        check_gates(functions, 5, form, torch.float32)
        check_rows_of_nan_stay_alone(functions, form, torch.bfloat16)
    for form in SHARED_FORMS:
        check_shares(functions, 7, form, torch.float16)
    check_against_truth(functions, 7, QWEN3, torch.float32)
    check_without_eps(functions)


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    reference, check_every_part, REFERENCE_FAULTS
)


FORM = RopeForm(2, 1, 4, has_norm=True)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"qkv_TC": torch.ones(3, 15)}, ShapeError, "have 16"),
        ({"q_weight_W": None}, OptionError, "q_weight_W is None"),
        ({"k_weight_W": None}, OptionError, "k_weight_W is None"),
        ({"form": None}, OptionError, "RopeForm"),
        ({"form": FORM._replace(has_norm=False)}, OptionError, "has_norm is False"),
        ({"form": FORM._replace(num_heads=0)}, OptionError, "num_heads"),
        ({"form": FORM._replace(num_kv_heads=1.0)}, OptionError, "num_kv_heads"),
        ({"form": FORM._replace(head_width=2048)}, OptionError, "between 2 and 1024"),
        ({"form": FORM._replace(rotary_width=3)}, OptionError, "even"),
        ({"form": FORM._replace(rotary_width=6)}, OptionError, "rotary_width"),
        ({"form": FORM._replace(head_width=5, rotary_width=None)}, OptionError, "even"),
        ({"form": FORM._replace(is_interleaved=None)}, OptionError, "is_interleaved"),
        ({"form": FORM._replace(eps=-1.0)}, OptionError, "eps"),
        ({"form": FORM._replace(weight_offset=float("nan"))}, OptionError, "weight_offset"),
    ],
)
def test_impossible_arguments_are_refused(change, error, message):
    rope = Rope(torch.ones(3, 4), torch.ones(3, 4), torch.ones(4), torch.ones(4), FORM)
    qkv_TC = change.pop("qkv_TC", torch.ones(3, 16))
    rope = rope._replace(**change)
    with pytest.raises(error, match=message):
        qk_rope_heads(qkv_TC, rope)
    if qkv_TC.shape == (3, 16):
        is_normed = not isinstance(rope.form, RopeForm) or rope.form.has_norm
        with pytest.raises(error, match=message):
            qk_rope_backward(heads_of(3, 1, 2), qkv_TC, rope, needs_weight=is_normed)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"d_heads": heads_of(3, 1, 3)},
            ShapeError,
            r"d_q_THW is \(3, 3, 4\) on cpu; it must be \(any, 2, 4\)",
        ),
        ({"d_heads": heads_of(3, 1, 2)._replace(k_TGW=torch.ones(3, 3, 4))}, ShapeError, "d_v_TJW is"),
        ({"d_heads": heads_of(3, 1, 2)._replace(v_TGW=torch.ones(3, 2, 4))}, ShapeError, "d_v_TJW is"),
        ({"qkv_TC": None}, ShapeError, "qkv_TC is None"),
        ({"needs_weight": None}, OptionError, "needs_weight"),
        ({"form": FORM._replace(has_norm=False), "q_weight_W": None, "k_weight_W": None}, OptionError, "no weights"),
        (
            {"form": FORM._replace(has_gate=True), "qkv_TC": torch.ones(3, 24), "out": torch.ones(3, 12)},
            ShapeError,
            "out",
        ),
    ],
)
def test_gradients_that_do_not_fit_are_refused(change, error, message):
    rope = Rope(torch.ones(3, 4), torch.ones(3, 4), torch.ones(4), torch.ones(4), FORM)
    rope = rope._replace(**{name: change.pop(name) for name in Rope._fields if name in change})
    arguments = {"d_heads": heads_of(3, 1, 2), "qkv_TC": torch.ones(3, 16), "needs_weight": True, **change}
    with pytest.raises(error, match=message):
        qk_rope_backward(rope=rope, **arguments)


def test_memory_that_is_still_read_is_refused():
    buffer = torch.ones(500)
    form = FORM._replace(has_gate=True)
    d_heads = split_heads(buffer[:48].view(3, 16), form)
    qkv_TC, cos_TW, sin_TW = (buffer[begin : begin + 72].view(3, 24) for begin in (60, 140, 220))
    rope = Rope(cos_TW[:, :4], sin_TW[:, :4], buffer[300:304], buffer[304:308], form)
    for begin in (0, 47, 61, 131, 150, 230, 300):
        out = buffer[begin : begin + 72].view(3, 24)
        with pytest.raises(ShapeError, match="shares memory"):
            qk_rope_backward(d_heads, qkv_TC, rope, needs_weight=True, out=out)
    out = buffer[400:472].view(3, 24)
    assert qk_rope_backward(d_heads, qkv_TC, rope, needs_weight=True, out=out)[0] is out
