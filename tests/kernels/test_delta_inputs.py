"""Inputs of the gated delta rule: the plain twin against the modules' code in float64, and what is refused."""

import pytest
import torch

from lightning_fastft.core.errors import OptionError, ShapeError
from lightning_fastft.kernels.delta_inputs import reference
from lightning_fastft.kernels.delta_inputs.op import (
    delta_inputs_backward,
    delta_inputs_forward,
    make_delta_inputs,
)
from lightning_fastft.kernels.delta_inputs.reference import DeltaForm, DeltaInputs, DeltaParameters
from lightning_fastft.kernels.handover import Handover
from tests.support.kernel_harness import NUM_RUNS
from tests.support.truth import Watch, assert_within_bound, fresh_memory_is_nan, poisoned, relative_error

DTYPES = (torch.float32, torch.bfloat16)
# Heads alone and in groups, columns by kind (Qwen3.5) and by key head (Qwen3-Next), widths that are no tiles.
FORMS = (
    DeltaForm(num_key_heads=2, num_heads=4, key_width=8, value_width=8),
    DeltaForm(num_key_heads=3, num_heads=3, key_width=12, value_width=16),
    DeltaForm(num_key_heads=2, num_heads=6, key_width=16, value_width=5, is_grouped=True),
)
LENGTHS = ((3, 1, 2, 5), (1,), (40, 1, 1, 30))


def positions(lengths, device="cpu"):
    return torch.cat([torch.arange(length) for length in lengths]).to(device)


def make(form, lengths, dtype, *, num_taps=4, device="cpu"):
    generator = torch.Generator().manual_seed(sum(lengths))

    def draw(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator).to(device, dtype)

    num_tokens = sum(lengths)
    rows = draw(num_tokens, form.num_columns)
    parameters = DeltaParameters(draw(form.num_channels, num_taps), draw(form.num_heads), draw(form.num_heads))
    queries, values = ((num_tokens, columns.num_heads, columns.width) for columns in (form.queries, form.values))
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    gates = [draw(num_tokens, form.num_heads, dtype=wide) for _ in range(2)]
    return rows, parameters, DeltaInputs(draw(*queries), draw(*queries), draw(*values), *gates)


def split_columns(rows, form):
    """Queries, keys, values, b and a as the modules of transformers split them."""
    groups, size = form.num_key_heads, form.group_size
    if form.is_grouped:
        mixed, gates = rows[:, : -2 * form.num_heads], rows[:, -2 * form.num_heads :]
        widths = [form.key_width, form.key_width, size * form.value_width, size * form.value_width]
        q, k, v, _ = mixed.unflatten(1, (groups, -1)).split(widths, dim=2)
        b, a = gates.unflatten(1, (groups, -1)).split([size, size], dim=2)
        return *(part.flatten(1) for part in (q, k, v)), b.flatten(1), a.flatten(1)
    num_keys, num_values = groups * form.key_width, form.num_heads * form.value_width
    widths = [num_keys, num_keys, num_values, num_values, form.num_heads, form.num_heads]
    q, k, v, _, b, a = rows.split(widths, dim=1)
    return q, k, v, b, a


def plain(rows, parameters, form, lengths):
    """The code of transformers, document by document."""
    outputs = []
    for part in rows.split(lengths):
        *heads, b, a = split_columns(part, form)
        x = torch.cat(heads, dim=1).T[None]
        weight, num_tokens = parameters.conv_weight_NK[:, None], len(part)
        x = torch.nn.functional.conv1d(x, weight, padding=weight.shape[-1] - 1, groups=len(weight))
        x = torch.nn.functional.silu(x[0, :, :num_tokens]).T
        q, k, v = x.split([head.shape[1] for head in heads], dim=1)
        q, k = (head.unflatten(1, (form.num_key_heads, -1)) for head in (q, k))
        q, k = (head * torch.rsqrt(head.square().sum(-1, keepdim=True) + 1e-6) for head in (q, k))
        wide = torch.promote_types(a.dtype, torch.float32)
        decay = torch.nn.functional.softplus(a.to(wide) + parameters.dt_bias_H)
        g = -parameters.a_log_H.to(wide).exp() * decay
        outputs.append((q, k, v.unflatten(1, (form.num_heads, -1)), g, torch.sigmoid(b).to(wide)))
    return DeltaInputs(*(torch.cat(parts) for parts in zip(*outputs)))


def differentiate(rows, parameters, d_outputs, form, lengths):
    leaves = [leaf.detach().requires_grad_() for leaf in (rows, *parameters)]
    outputs = plain(leaves[0], DeltaParameters(*leaves[1:]), form, lengths)
    gradients = torch.autograd.grad(outputs, leaves, [d.to(out.dtype) for d, out in zip(d_outputs, outputs)])
    return [*(out.detach() for out in outputs), *gradients]


def in_double(parts):
    return type(parts)(*(part.double() for part in parts))


def check(module, form, lengths, dtype, *, device="cpu", num_taps=4):
    rows, parameters, d_outputs = make(form, lengths, dtype, num_taps=num_taps, device=device)
    truth = differentiate(rows.double(), in_double(parameters), in_double(d_outputs), form, lengths)
    narrow = differentiate(rows, parameters, d_outputs, form, lengths)
    position, apart = positions(lengths, device), poisoned(rows)
    with fresh_memory_is_nan():
        outputs = module.delta_inputs_forward(apart, parameters, position, form=form)
        runs = []
        for needs_weights in (*[True] * NUM_RUNS, False):
            out = torch.full_like(rows, 7.0)
            d_parameters = module.delta_inputs_backward(
                d_outputs, apart, parameters, position, form=form, needs_weights=needs_weights, out=out
            )
            assert (d_parameters is None) is not needs_weights
            runs.append([out, *(d_parameters or runs[0][1:])])
    assert all(torch.equal(one, other) for run in runs[1:] for one, other in zip(runs[0], run))
    assert (form.gates.read(runs[0][0]) == 7.0).all()
    form.gates.write(runs[0][0], torch.zeros(sum(lengths), form.num_heads, form.value_width, device=device))
    names = (*DeltaInputs._fields, "d_rows", *DeltaParameters._fields)
    for name, value, near, exact in zip(names, (*outputs, *runs[0]), narrow, truth):
        assert value.is_contiguous()
        if name == "g_TH":
            # A product of two functions: how near plain PyTorch comes in a few values is luck, as in three sums below.
            assert relative_error(value, exact) <= 4 * torch.finfo(value.dtype).eps
        elif name in ("a_log_H", "dt_bias_H"):
            assert relative_error(value, exact) <= 8 * torch.finfo(dtype).eps, name
        else:
            assert_within_bound(name, value, plain=near, truth=exact, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_the_twin_equals_each_document_alone(form, dtype):
    for lengths in LENGTHS:
        check(reference, form, lengths, dtype)


@pytest.mark.parametrize("num_taps", [1, 2, 7])
def test_number_of_taps(num_taps):
    check(reference, FORMS[0], LENGTHS[0], torch.float32, num_taps=num_taps)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_reach_autograd_with_the_columns_of_the_gates(form):
    lengths = LENGTHS[0]
    rows, parameters, d_outputs = make(form, lengths, torch.float64)
    *_, d_rows, d_conv, d_a_log, d_dt_bias = differentiate(rows, parameters, d_outputs, form, lengths)
    leaves = [leaf.requires_grad_() for leaf in (rows, *parameters)]
    held = Handover()
    with Watch() as watch:
        found = make_delta_inputs(rows, parameters, positions(lengths), form=form, row_gradient=held)
        held.put(torch.full_like(rows, 3.0))
        torch.autograd.backward(found, d_outputs)
    assert watch.waits == []
    assert held.take() is None
    form.gates.write(d_rows, torch.full((sum(lengths), form.num_heads, form.value_width), 3.0).double())
    for leaf, truth in zip(leaves, (d_rows, d_conv, d_a_log, d_dt_bias)):
        assert torch.allclose(leaf.grad, truth)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rows_TC": torch.ones(11, 99)}, ShapeError, "columns"),
        ({"form": FORMS[0]._asdict()}, OptionError, "DeltaForm"),
    ],
)
def test_what_the_kernels_would_read_wrongly_is_refused(change, error, message):
    rows, parameters, _ = make(FORMS[0], LENGTHS[0], torch.float32)
    given = {
        "rows_TC": rows, "parameters": parameters, "position_T": positions(LENGTHS[0]), "form": FORMS[0], **change
    }  # fmt: skip
    with pytest.raises(error, match=message):
        delta_inputs_forward(**given)


def test_memory_that_is_still_read_is_refused():
    rows, parameters, d_outputs = make(FORMS[0], LENGTHS[0], torch.float32)
    with pytest.raises(ShapeError, match="shares memory"):
        delta_inputs_backward(
            d_outputs, rows, parameters, positions(LENGTHS[0]), form=FORMS[0], needs_weights=False, out=rows
        )
