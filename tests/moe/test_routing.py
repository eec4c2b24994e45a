"""Routed experts against a loop over experts in plain PyTorch, forward and every gradient."""

from functools import partial
from itertools import product

import pytest
import torch

from lightning_fastft.core.errors import ShapeError
from lightning_fastft.kernels.expert_gate.reference import GateForm, gate_forward
from lightning_fastft.kernels.grouped_mm.reference import GatheredRows
from lightning_fastft.moe import expert_linears as experts
from lightning_fastft.moe.expert_linears import ExpertAdapter, ExpertLinear
from lightning_fastft.moe.routing import run_experts
from tests.support.host_waits import HostWaits

WIDTH, EXPERT_WIDTH = 12, 7
SILU = GateForm()
CLAMPED = GateForm(is_interleaved=True, activation="clamped")
# Names of the tensors of one product, in the order of _tensors_of.
PARTS = ("weight", "bias", "a", "b")


def plain_product(x_ND, linear, expert):
    y_NO = x_ND @ linear.weight_EIO[expert]
    if linear.adapter is not None:
        y_NO = y_NO + linear.adapter.scale * (x_ND @ linear.adapter.a_EIR[expert]) @ linear.adapter.b_ERO[expert]
    return y_NO if linear.bias_EO is None else y_NO + linear.bias_EO[expert]


def plain_gate(columns, form):
    gate, up = (columns[:, ::2], columns[:, 1::2]) if form.is_interleaved else columns.chunk(2, dim=1)
    if form.activation == "clamped":
        gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
        return (up + 1) * gate * torch.sigmoid(form.alpha * gate)
    return torch.nn.functional.silu(gate) * up


def plain_experts(x_TD, expert_TK, weight_TK, *, gate_up, down, form, num_experts, has_gate=True):
    """One expert after the other, each on its own tokens."""
    y_TD = torch.zeros_like(x_TD)
    for expert, choice in product(range(num_experts), range(expert_TK.shape[1])):
        token_N = (expert_TK[:, choice] == expert).nonzero()[:, 0]
        columns = plain_product(x_TD[token_N], gate_up, expert)
        act = plain_gate(columns, form) if has_gate else torch.nn.functional.silu(columns)
        out = plain_product(act, down, expert) * weight_TK[token_N, choice, None]
        y_TD = y_TD.index_add(0, token_N, out.to(y_TD.dtype))
    return y_TD


def make_linear(num_experts, num_inputs, num_outputs, *, rank, has_bias, is_transposed):
    """Weights as transformers stores them in two layouts, adapters as PEFT does."""
    weight = torch.randn(num_experts, num_inputs, num_outputs) * 0.4
    if not is_transposed:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    adapter = None
    if rank:
        a_ERI = torch.randn(num_experts, rank, num_inputs) * 0.4
        b_ORE = torch.randn(num_outputs, rank, num_experts) * 0.4
        adapter = ExpertAdapter(a_ERI.transpose(1, 2), b_ORE.permute(2, 1, 0), 0.7)
    return ExpertLinear(weight, torch.randn(num_experts, num_outputs) if has_bias else None, adapter)


def make_case(
    *,
    num_tokens=23,
    num_experts=5,
    num_chosen=2,
    rank=0,
    has_bias=False,
    is_transposed=False,
    has_gate=True,
    route="random",
):
    x_TD = torch.randn(num_tokens, WIDTH)
    if route == "one":
        expert_TK = torch.full((num_tokens, num_chosen), num_experts - 1)
    else:
        scores = torch.rand(num_tokens, num_experts)
        if route == "empty":
            scores[:, ::2] = -1.0
        expert_TK = scores.topk(num_chosen, dim=1).indices
    if route == "sentinels":
        expert_TK[torch.rand(expert_TK.shape) < 0.3] = num_experts
    weight_TK = torch.rand(num_tokens, num_chosen)
    columns = (2 if has_gate else 1) * EXPERT_WIDTH
    linears = [
        make_linear(num_experts, inputs, outputs, rank=rank, has_bias=has_bias, is_transposed=is_transposed)
        for inputs, outputs in ((WIDTH, columns), (EXPERT_WIDTH, WIDTH))
    ]
    return x_TD, expert_TK, weight_TK, *linears


def tensors_of(x_TD, weight_TK, gate_up, down):
    """Everything that can have a gradient, by name."""
    named = {"x": x_TD, "routing": weight_TK}
    for name, linear in (("gate_up", gate_up), ("down", down)):
        adapter = linear.adapter or (None, None)
        named |= {
            f"{name}.{part}": tensor
            for part, tensor in zip(PARTS, (linear.weight_EIO, linear.bias_EO, *adapter[:2]))
            if tensor is not None
        }
    return named


def with_narrow(adapter, dtype):
    """The adapter with low-precision copies of its factors."""
    copy_a_ERI, copy_b_ERO = (
        factor.detach().to(dtype).contiguous() for factor in (adapter.a_EIR.transpose(1, 2), adapter.b_ERO)
    )
    return adapter._replace(copy_a_ERI=copy_a_ERI, copy_b_ERO=copy_b_ERO)


def run(function, case, *, dtype, trained, form=SILU, factor_dtype=None, has_narrow=False, **options):
    """Output and gradients of the named tensors, from copies in dtype; adapters in factor_dtype."""
    x_TD, expert_TK, weight_TK, gate_up, down = case

    def cast(tensor, wanted):
        return None if tensor is None else tensor.detach().to(wanted, copy=True, memory_format=torch.preserve_format)

    linears = []
    for linear in (gate_up, down):
        adapter = None
        if linear.adapter is not None:
            factors = (cast(factor, factor_dtype or dtype) for factor in linear.adapter[:2])
            adapter = ExpertAdapter(*factors, linear.adapter.scale)
            adapter = with_narrow(adapter, dtype) if has_narrow else adapter
        linears.append(ExpertLinear(cast(linear.weight_EIO, dtype), cast(linear.bias_EO, dtype), adapter))
    x_TD, weight_TK = cast(x_TD, dtype), cast(weight_TK, factor_dtype or dtype)
    named = tensors_of(x_TD, weight_TK, *linears)
    for name in trained:
        named[name].requires_grad_()
    y_TD = function(
        x_TD,
        expert_TK,
        weight_TK,
        gate_up=linears[0],
        down=linears[1],
        form=form,
        num_experts=gate_up.weight_EIO.shape[0],
        **options,
    )
    coefficients = torch.randn(y_TD.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    (y_TD * coefficients.to(dtype)).sum().backward()
    return {"y": y_TD.detach(), **{name: named[name].grad for name in trained}}


def assert_close(found, true, *, bound):
    for name, expected in true.items():
        norm = expected.double().norm()
        error = (found[name].double() - expected.double()).norm() / norm if norm else found[name].double().norm()
        assert error <= bound, f"{name}: {error:.2e} of its norm"


ALL = tuple(f"{name}.{part}" for name in ("gate_up", "down") for part in PARTS)
WHOLE = ("x", "routing", *ALL)
FROZEN = ("x", "routing")
ADAPTERS = ("x", "routing", "gate_up.a", "gate_up.b", "down.a", "down.b")


# Where only two experts have tokens, no token has more than two.
ROUTES = [
    (route, count)
    for route in ("random", "one", "empty", "sentinels")
    for count in (1, 2, 4)
    if (route, count) != ("empty", 4)
]


@pytest.mark.covering
@pytest.mark.parametrize(("route", "num_chosen"), ROUTES)
@pytest.mark.parametrize("form", [SILU, CLAMPED], ids=["silu", "clamped"])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_output_and_every_gradient(form, route, num_chosen, is_transposed):
    case = make_case(rank=4, has_bias=True, is_transposed=is_transposed, route=route, num_chosen=num_chosen)
    true = run(plain_experts, case, dtype=torch.float64, trained=WHOLE, form=form)
    assert_close(run(run_experts, case, dtype=torch.float64, trained=WHOLE, form=form), true, bound=1e-12)
    assert_close(run(run_experts, case, dtype=torch.float32, trained=WHOLE, form=form), true, bound=1e-6)


@pytest.mark.parametrize(
    "trained", [FROZEN, ADAPTERS, ("x",), ("routing",), *((name,) for name in ALL)], ids=lambda names: names[-1]
)
def test_only_what_is_trained_has_a_gradient(trained):
    case = make_case(rank=4, has_bias=True)
    true = run(plain_experts, case, dtype=torch.float64, trained=trained)
    found = run(run_experts, case, dtype=torch.float64, trained=trained)
    assert found.keys() == true.keys()
    assert_close(found, true, bound=1e-12)


@pytest.mark.parametrize(("rank", "has_bias"), [(0, False), (0, True), (4, False)])
def test_without_bias_or_adapter(rank, has_bias):
    case = make_case(rank=rank, has_bias=has_bias)
    trained = [name for name in WHOLE if name in tensors_of(case[0], case[2], *case[3:])]
    true = run(plain_experts, case, dtype=torch.float64, trained=trained)
    assert_close(run(run_experts, case, dtype=torch.float64, trained=trained), true, bound=1e-12)


def test_experts_without_a_gate():
    case = make_case(has_gate=False)
    trained = ("x", "routing", "gate_up.weight", "down.weight")
    true = run(plain_experts, case, dtype=torch.float64, trained=trained, has_gate=False)
    assert_close(run(run_experts, case, dtype=torch.float64, trained=trained, has_gate=False), true, bound=1e-12)


@pytest.mark.covering
@pytest.mark.parametrize("num_tokens", [0, 1])
@pytest.mark.parametrize("num_experts", [1, 3])
def test_smallest_sizes(num_tokens, num_experts):
    case = make_case(num_tokens=num_tokens, num_experts=num_experts, num_chosen=1, rank=2, has_bias=True)
    true = run(plain_experts, case, dtype=torch.float64, trained=WHOLE)
    assert_close(run(run_experts, case, dtype=torch.float64, trained=WHOLE), true, bound=1e-12)


def test_wide_masters_of_adapters_and_routing_weights_get_wide_gradients():
    case = make_case(num_tokens=300, rank=8)
    true = run(plain_experts, case, dtype=torch.float64, trained=ADAPTERS)
    found = run(run_experts, case, dtype=torch.bfloat16, factor_dtype=torch.float32, trained=ADAPTERS)
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "y": torch.bfloat16, "x": torch.bfloat16, **dict.fromkeys(ADAPTERS[1:], torch.float32)
    }  # fmt: skip
    assert_close(found, true, bound=2e-2)
    # Summed wide, not cast afterwards.
    for name in ADAPTERS[2:]:
        assert not torch.equal(found[name], found[name].bfloat16().float()), name


@pytest.mark.covering
@pytest.mark.parametrize(
    "trained", [ADAPTERS, ("gate_up.a",), ("gate_up.b",), ("down.a",), ("down.b",), FROZEN], ids=lambda names: names[-1]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copied_factors_give_the_same_bits(dtype, trained):
    case = make_case(num_tokens=60, rank=8, has_bias=True, route="sentinels")
    expected = run(run_experts, case, dtype=dtype, factor_dtype=torch.float32, trained=trained)
    found = run(run_experts, case, dtype=dtype, factor_dtype=torch.float32, trained=trained, has_narrow=True)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_copied_factors_are_what_is_read():
    """Masters of NaN: nothing reads them, and they get the gradients."""
    case = make_case(num_tokens=60, rank=8)
    adapters = []
    for linear in case[3:]:
        adapter = with_narrow(linear.adapter, torch.float32)
        adapters.append(
            adapter._replace(
                a_EIR=torch.full_like(adapter.a_EIR, float("nan")), b_ERO=torch.full_like(adapter.b_ERO, float("nan"))
            )
        )
    expected = run(run_experts, case, dtype=torch.float32, trained=ADAPTERS)
    masters = [factor.requires_grad_() for adapter in adapters for factor in adapter[:2]]
    linears = [linear._replace(adapter=adapter) for linear, adapter in zip(case[3:], adapters)]
    y_TD = run_experts(*case[:3], gate_up=linears[0], down=linears[1], form=SILU, num_experts=5)
    coefficients = torch.randn(y_TD.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    (y_TD * coefficients.float()).sum().backward()
    assert torch.equal(y_TD, expected["y"])
    for master, name in zip(masters, ADAPTERS[2:]):
        assert torch.equal(master.grad, expected[name]), name


@pytest.mark.parametrize("index", [0, 1])
def test_a_copied_factor_that_changes_before_the_backward_is_an_error(index):
    x_TD, expert_TK, weight_TK, gate_up, down = make_case(rank=4)
    down = down._replace(adapter=with_narrow(down.adapter, torch.float32))
    y_TD = run_experts(
        x_TD.requires_grad_(), expert_TK, weight_TK, gate_up=gate_up, down=down, form=SILU, num_experts=5
    )
    down.adapter[3 + index].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y_TD.sum().backward()


@pytest.mark.parametrize("is_a_last", [False, True], ids=["b has the expert last", "a has the expert last"])
def test_a_gradient_lies_in_memory_as_its_parameter_and_is_not_copied(is_a_last, monkeypatch):
    """PEFT's two parameters of a stack, either of them in front: autograd takes the very memory that was written."""
    num_experts, rank = 5, 4
    made = set()
    for name in ("grouped_weight_grad", "exchange_ends"):
        real = getattr(experts, name)

        def noting(*arguments, real=real, **options):
            result = real(*arguments, **options)
            made.add(result.data_ptr())
            return result

        monkeypatch.setattr(experts, name, noting)
    x_TD, expert_TK, weight_TK, gate_up, down = make_case(rank=rank, num_experts=num_experts)
    parameters, linears = [], []
    for linear in (gate_up, down):
        _, num_inputs, num_outputs = linear.weight_EIO.shape
        first, last = (num_outputs, num_inputs) if is_a_last else (num_inputs, num_outputs)
        expert_first = torch.nn.Parameter(torch.randn(num_experts * rank, first))
        expert_last = torch.nn.Parameter(torch.randn(last, rank * num_experts))
        parameters += [expert_first, expert_last]
        front, back = (
            expert_first.view(num_experts, rank, first),
            expert_last.view(last, rank, num_experts).permute(2, 1, 0),
        )
        a_ERI, b_ERO = (back, front) if is_a_last else (front, back)
        linears.append(linear._replace(adapter=ExpertAdapter(a_ERI.transpose(1, 2), b_ERO, 0.7)))
    run_experts(
        x_TD, expert_TK, weight_TK, gate_up=linears[0], down=linears[1], form=SILU, num_experts=num_experts
    ).sum().backward()
    for parameter in parameters:
        assert parameter.grad.is_contiguous()
        assert parameter.grad.data_ptr() in made


@pytest.mark.parametrize(
    "change",
    [
        {"copy_b_ERO": None},
        {"copy_a_ERI": None},
        {"copy_a_ERI": torch.zeros(5, 3, 12)},
        {"copy_b_ERO": torch.zeros(5, 4, 14).double()},
        {"copy_b_ERO": torch.zeros(14, 4, 5).permute(2, 1, 0)},
    ],
)
def test_copied_factors_that_do_not_fit(change):
    x_TD, expert_TK, weight_TK, gate_up, down = make_case(rank=4)
    gate_up = gate_up._replace(adapter=with_narrow(gate_up.adapter, torch.float32)._replace(**change))
    with pytest.raises(ShapeError, match=f"{next(iter(change))} of gate_up"):
        run_experts(x_TD, expert_TK, weight_TK, gate_up=gate_up, down=down, form=SILU, num_experts=5)


@pytest.mark.parametrize("more", [16, 8], ids=["read in place", "copied"])
def test_a_gradient_may_be_rows_of_a_wider_buffer(more, monkeypatch):
    """As a fused projection leaves it, with the columns of its adapters; rows that kernels read slowly are copied."""
    x_TD, expert_TK, weight_TK, gate_up, down = make_case(rank=4)
    x_TD, read = torch.randn(23, 32), []
    gate_up, down = (
        make_linear(5, *sizes, rank=4, has_bias=False, is_transposed=False)
        for sizes in ((32, 2 * EXPERT_WIDTH), (EXPERT_WIDTH, 32))
    )
    real = experts.grouped_mm

    def noting(x_NI, *arguments, **options):
        read.append(x_NI.x_TI.data_ptr() if isinstance(x_NI, GatheredRows) else 0)
        return real(x_NI, *arguments, **options)

    monkeypatch.setattr(experts, "grouped_mm", noting)
    wide = torch.randn(23, 32 + more)
    found = []
    for d_y_TD in (wide[:, :32].clone(), wide[:, :32]):
        leaf = x_TD.clone().requires_grad_()
        y_TD = run_experts(leaf, expert_TK, weight_TK, gate_up=gate_up, down=down, form=SILU, num_experts=5)
        found.append(torch.autograd.grad(y_TD, leaf, d_y_TD)[0])
    assert torch.equal(*found)
    assert (wide.data_ptr() in read) == (more == 16)


def test_two_runs_are_bit_equal():
    case = make_case(num_tokens=200, rank=4, has_bias=True)
    first, second = (run(run_experts, case, dtype=torch.float32, trained=WHOLE) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_sentinel_rows_are_never_read(monkeypatch):
    """Rows behind the last expert hold NaN in everything that is allocated, and none arrives."""
    case = make_case(rank=4, has_bias=True, route="sentinels")
    true = run(plain_experts, case, dtype=torch.float64, trained=WHOLE)
    real = experts.grouped_mm

    def poisoned(x_NI, weight_EIO, end_E, **options):
        out = weight_EIO.new_full((x_NI.shape[0], weight_EIO.shape[2]), float("nan"))
        return real(x_NI, weight_EIO, end_E, out=out, **options)

    monkeypatch.setattr(experts, "grouped_mm", poisoned)
    assert_close(run(run_experts, case, dtype=torch.float64, trained=WHOLE), true, bound=1e-12)


def test_only_the_first_product_is_kept_for_the_backward():
    """N x P values besides the input, the order and the routing weights: no activation, no output of an expert,
    no copy of a factor.
    """
    x_TD, expert_TK, weight_TK, gate_up, down = make_case(rank=4)
    factors = {factor.requires_grad_().data_ptr() for linear in (gate_up, down) for factor in linear.adapter[:2]}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        run_experts(x_TD.requires_grad_(), expert_TK, weight_TK, gate_up=gate_up, down=down, form=SILU, num_experts=5)
    num_slots = expert_TK.numel()
    sizes = sorted(tensor.numel() for tensor in saved if tensor.data_ptr() not in factors)
    assert sizes == sorted(
        [x_TD.numel(), num_slots, num_slots, num_slots, 5, num_slots * 2 * EXPERT_WIDTH, num_slots * 4]
    )


def test_nobody_waits_for_the_device(monkeypatch):
    """With torch's grouped products, which the device would run: the plain ones loop over experts on the host."""
    monkeypatch.setattr(experts, "grouped_mm", partial(experts.grouped_mm, backend="torch"))
    monkeypatch.setattr(experts, "grouped_weight_grad", partial(experts.grouped_weight_grad, backend="torch"))
    x_TD, weight_TK = torch.randn(16, 12, requires_grad=True), torch.rand(16, 2, requires_grad=True)
    expert_TK = torch.rand(16, 4).topk(2, dim=1).indices
    gate_up, down = (
        ExpertLinear(torch.randn(4, inputs, outputs, requires_grad=True)) for inputs, outputs in ((12, 16), (8, 12))
    )
    with HostWaits() as waits:
        run_experts(x_TD, expert_TK, weight_TK, gate_up=gate_up, down=down, form=SILU, num_experts=4).sum().backward()
    assert waits.total == 0, waits.origin
    assert gate_up.weight_EIO.grad is not None
    assert gate_up.weight_EIO.grad.abs().sum() > 0


def test_shapes_that_do_not_fit():
    x_TD, expert_TK, weight_TK, gate_up, down = make_case()
    with pytest.raises(ShapeError, match="a row per token"):
        run_experts(x_TD[1:], expert_TK, weight_TK, gate_up=gate_up, down=down, form=SILU, num_experts=5)
    with pytest.raises(ShapeError, match="a row per token"):
        run_experts(x_TD, expert_TK, weight_TK[:, :1], gate_up=gate_up, down=down, form=SILU, num_experts=5)


def test_the_gate_of_the_tests_is_the_gate_of_the_package():
    columns = torch.randn(9, 14) * 5
    for form in (SILU, CLAMPED):
        torch.testing.assert_close(gate_forward(columns, form=form), plain_gate(columns, form), rtol=1e-5, atol=1e-5)
