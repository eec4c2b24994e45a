"""Gated heads: the plain twin against autograd in float64 and the modules of transformers, and what is refused."""

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

from lightning_fastft.core.errors import OptionError, ShapeError
from lightning_fastft.kernels.handover import Handover
from lightning_fastft.kernels.head_columns import HeadColumns
from lightning_fastft.kernels.head_gate import reference
from lightning_fastft.kernels.head_gate.op import gate_heads, head_gate_backward, head_gate_forward
from lightning_fastft.kernels.head_gate.reference import HeadGateForm
from tests.support.truth import Watch, assert_within_bound, fresh_memory_is_nan, poisoned

DTYPES = (torch.float32, torch.bfloat16)
# Gates behind each query head, of a gated attention; groups of gates, and gates side by side, of a gated delta rule.
FORMS = (
    HeadGateForm(HeadColumns(begin=8, width=8, num_heads=3, group_size=1, group_step=16)),
    HeadGateForm(HeadColumns(5, 12, num_heads=4, group_size=2, group_step=31), "silu", has_norm=True),
    HeadGateForm(HeadColumns(16, 16, num_heads=5, group_size=5, group_step=80), "silu", has_norm=True, eps=1e-3),
    HeadGateForm(HeadColumns(0, 16, num_heads=2, group_size=2, group_step=32), "silu"),
)


def make(form, num_tokens, dtype, *, device="cpu"):
    generator = torch.Generator().manual_seed(num_tokens)
    columns = form.columns
    shapes = ((num_tokens, columns.num_heads, columns.width), (num_tokens, columns.end + 3), (columns.width,))
    x, rows, weight = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    d_y = torch.randn(num_tokens, columns.num_heads * columns.width, generator=generator).to(device, dtype)
    return d_y, x, rows, weight if form.has_norm else None


def plain(x, rows, weight, form):
    """The formula as transformers has it."""
    gate = form.columns.read(rows)
    if weight is not None:
        x = weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + form.eps))
    activate = torch.sigmoid if form.activation == "sigmoid" else torch.nn.functional.silu
    return (x * activate(gate)).flatten(1)


def differentiate(d_y, x, rows, weight, form):
    leaves = [None if leaf is None else leaf.detach().requires_grad_() for leaf in (x, rows, weight)]
    out = plain(*leaves, form)
    given = [leaf for leaf in leaves if leaf is not None]
    return out.detach(), *torch.autograd.grad(out, given, d_y)


def check(module, num_tokens, form, dtype, *, device="cpu"):
    d_y, x, rows, weight = make(form, num_tokens, dtype, device=device)
    truth = differentiate(*(None if part is None else part.double() for part in (d_y, x, rows, weight)), form)
    narrow = differentiate(d_y, x, rows, weight, form)
    apart = [poisoned(part) for part in (d_y, rows)]
    with fresh_memory_is_nan():
        y = module.head_gate_forward(x, apart[1], weight, form=form)
        runs = []
        for _ in range(2):
            out = torch.full_like(rows, 7.0)
            found = module.head_gate_backward(
                apart[0], x, apart[1], weight, form=form, needs_weight=form.has_norm, out=out
            )
            runs.append([out, *(part for part in found if part is not None)])
    assert all(torch.equal(*pair) for pair in zip(*runs))
    out, d_x, *d_weight = runs[0]
    is_gate = torch.zeros(rows.shape[1], dtype=torch.bool, device=device)
    columns = form.columns
    is_gate[columns.read(torch.arange(rows.shape[1], device=device)[None]).flatten()] = True
    assert (out[:, ~is_gate] == 7.0).all()
    ours = [y, d_x, torch.where(is_gate, out, 0), *d_weight]
    for name, value, near, exact in zip(("y", "d_x", "d_gate", "d_weight"), ours, narrow, truth):
        assert_within_bound(name, value, plain=near, truth=exact, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_the_twin_equals_autograd(form, dtype):
    for num_tokens in (1, 7):
        check(reference, num_tokens, form, dtype)


def test_the_gated_norm_is_that_of_transformers():
    form = FORMS[1]
    _, x, rows, weight = make(form, 5, torch.float32)
    norm = Qwen3_5RMSNormGated(12, eps=form.eps)
    norm.weight.data = weight
    expected = norm(x, form.columns.read(rows)).detach()
    assert torch.allclose(head_gate_forward(x, rows, weight, form=form), expected.flatten(1), atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_the_gradient_of_the_gates_goes_to_their_columns(form):
    d_y, x, rows, weight = make(form, 6, torch.float64)
    _, d_x, d_rows, *d_weight = differentiate(d_y, x, rows, weight, form)
    leaves = [None if leaf is None else leaf.requires_grad_() for leaf in (x, rows, weight)]
    held = Handover()
    with Watch() as watch:
        gate_heads(*leaves, form=form, row_gradient=held).backward(d_y)
    assert watch.waits == []
    (taken,) = held.take()
    assert held.take() is None
    columns = form.columns
    assert torch.allclose(columns.read(taken), columns.read(d_rows))
    assert torch.allclose(x.grad, d_x)
    assert rows.grad is None
    assert not d_weight or torch.allclose(weight.grad, d_weight[0])


def test_without_tokens():
    d_y, x, rows, weight = make(FORMS[1], 0, torch.float32)
    assert head_gate_forward(x, rows, weight, form=FORMS[1]).shape == (0, 48)
    d_x_THW, d_weight_W = head_gate_backward(
        d_y, x, rows, weight, form=FORMS[1], needs_weight=True, out=torch.empty_like(rows)
    )
    assert d_x_THW.shape == x.shape
    assert torch.equal(d_weight_W, torch.zeros(12))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rows_TC": torch.ones(3, 40)}, ShapeError, "end at column 48"),
        ({"weight_W": torch.ones(8)}, OptionError, "weight_W"),
        ({"form": FORMS[0]._replace(activation="relu")}, OptionError, "activation"),
    ],
)
def test_what_the_kernel_would_read_wrongly_is_refused(change, error, message):
    _, x, rows, _ = make(FORMS[0], 3, torch.float32)
    given = {"x_THW": x, "rows_TC": rows, "form": FORMS[0], **change}
    with pytest.raises(error, match=message):
        head_gate_forward(**given)


def test_memory_that_is_still_read_is_refused():
    d_y, x, rows, _ = make(FORMS[0], 3, torch.float32)
    with pytest.raises(ShapeError, match="shares memory"):
        head_gate_backward(d_y, x, rows, form=FORMS[0], needs_weight=False, out=rows)
    with pytest.raises(OptionError, match="needs_weight"):
        head_gate_backward(d_y, x, rows, form=FORMS[0], needs_weight=True, out=torch.empty_like(rows))
