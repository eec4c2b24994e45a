"""FusedAdamW: the numbers, state and files of torch.optim.AdamW; clipping and low-precision copies in the same pass."""

import copy
import io
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_fastft.core.errors import OptionError, ResumeError
from lightning_fastft.training.optimization import adamw_parts
from lightning_fastft.training.optimizer import FusedAdamW
from tests.support.host_waits import count_host_waits
from tests.support.truth import assert_within_bound

SHAPES = ((7, 5), (5,), (), (3, 2, 4), (0, 4), (4099,))
OPTIONS = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
AVERAGES = ("exp_avg", "exp_avg_sq")


def make_params(dtype=torch.float32):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def make_8bit_params(dtype=torch.float32):
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((70, 70), (5,), (4100,))]


def make_groups(params):
    return [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.0, "betas": (0.9, 0.99)}]


def plain_adamw(params, **options):
    """The form whose bits the twin has."""
    return torch.optim.AdamW(params, foreach=False, fused=False, **{**OPTIONS, **options})


def fused_adamw(params, **options):
    return FusedAdamW(params, **{**OPTIONS, **options})


def give_gradients(step, *runs, missing=(), size=1.0):
    """The same gradients, new tensors in each step, for the parameters of each run."""
    generator = torch.Generator().manual_seed(100 + step)
    for index, params in enumerate(zip(*runs)):
        grad = torch.randn(params[0].shape, generator=generator) * size * 10.0 ** (index - 2)
        for param in params:
            param.grad = None if index in missing else grad.to(param.dtype, copy=True)


def assert_same_state(one, other):
    numbers = [number for number, state in one.state_dict()["state"].items() if state]
    assert numbers == [number for number, state in other.state_dict()["state"].items() if state]
    for number in numbers:
        ours, theirs = (optimizer.state_dict()["state"][number] for optimizer in (one, other))
        assert set(ours) == set(theirs) == {"step", *AVERAGES}
        for name in ours:
            assert torch.equal(ours[name], theirs[name]), f"{name} of parameter {number}"


def assert_equal_states(one, other):
    """Two state dicts hold the same names and bits."""
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for number, state in one["state"].items():
        assert state.keys() == other["state"][number].keys()
        assert all(torch.equal(value, other["state"][number][name]) for name, value in state.items())


def assert_same_params(ours, theirs):
    for index, (one, other) in enumerate(zip(ours, theirs)):
        assert torch.equal(one, other), f"parameter {index}"


# Numbers.


def test_twenty_steps_with_schedule_groups_and_missing_gradients_have_the_bits_of_torch():
    ours, theirs = make_params(), make_params()
    optimizers = [fused_adamw(make_groups(ours)), plain_adamw(make_groups(theirs))]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step)) for optimizer in optimizers
    ]
    for step in range(20):
        # One is never there, one comes late, one is there at times, and once there is none.
        missing = (
            range(len(SHAPES)) if step == 7 else {3} | ({0} if step < 5 else set()) | ({5} if step % 3 == 1 else set())
        )
        give_gradients(step, ours, theirs, missing=missing)
        for optimizer, schedule in zip(optimizers, schedules):
            optimizer.step()
            schedule.step()
        assert_same_params(ours, theirs)
    assert_same_state(*optimizers)
    assert not optimizers[0].state.get(ours[3])
    assert [int(optimizers[0].state[ours[index]]["step"]) for index in (0, 1, 5)] == [14, 19, 13]
    assert all(
        state["step"].device.type == "cpu" and state["step"].dtype is torch.float32
        for state in optimizers[0].state.values()
        if state
    )


def test_bf16_weights_are_the_rounded_fp32_step_and_their_averages_are_fp32():
    ours = make_params(torch.bfloat16)
    wide = [nn.Parameter(param.detach().float()) for param in ours]
    optimizer, plain = fused_adamw(make_groups(ours)), plain_adamw(make_groups(wide))
    for step in range(5):
        for param, twin in zip(ours, wide):
            twin.data.copy_(param)
        give_gradients(step, ours)
        for param, twin in zip(ours, wide):
            twin.grad = param.grad.float()
        optimizer.step()
        plain.step()
        assert_same_params(ours, [twin.bfloat16() for twin in wide])
    assert_same_state(optimizer, plain)
    assert {optimizer.state[param][name].dtype for param in ours for name in AVERAGES} == {torch.float32}


@pytest.mark.parametrize("change", [{}, {"lr": torch.tensor(0.05)}, {"weight_decay": 0.0}, {"betas": (0.0, 0.0)}])
def test_options_have_the_defaults_and_the_meaning_of_torch(change):
    ours, theirs = make_params(), make_params()
    given = {name: float(value) if isinstance(value, torch.Tensor) else value for name, value in change.items()}
    optimizers = FusedAdamW(ours, **change), torch.optim.AdamW(theirs, foreach=False, **given)
    for step in range(3):
        give_gradients(step, ours, theirs)
        for optimizer in optimizers:
            optimizer.step()
    assert_same_params(ours, theirs)


# Clipping.


@pytest.mark.parametrize("max_norm", [0.5, 1e9, 0.0])
def test_clipping_is_that_of_torch_and_leaves_gradients_as_they_are(max_norm):
    runs = {
        kind: make_params(torch.float64 if kind == "truth" else torch.float32) for kind in ("ours", "plain", "truth")
    }
    ours, optimizers = (
        runs["ours"],
        {kind: (fused_adamw if kind == "ours" else plain_adamw)(make_groups(run)) for kind, run in runs.items()},
    )
    for step in range(20):
        give_gradients(step, *runs.values(), missing={1} if step == 3 else (), size=1.0 if step % 2 else 1e-3)
        norms = {kind: torch.nn.utils.clip_grad_norm_(runs[kind], max_norm) for kind in ("plain", "truth")}
        before = [None if param.grad is None else param.grad.clone() for param in ours]
        norm = optimizers["ours"].clip_next(max_norm)
        assert_within_bound("norm", norm, plain=norms["plain"], truth=norms["truth"], dtype=torch.float32)
        assert norm.shape == ()
        for optimizer in optimizers.values():
            optimizer.step()
        assert all(param.grad is None or torch.equal(param.grad, old) for param, old in zip(ours, before))
    for index in range(len(SHAPES)):
        assert_within_bound(
            f"param {index}",
            ours[index].detach(),
            plain=runs["plain"][index].detach(),
            truth=runs["truth"][index].detach(),
            dtype=torch.float32,
        )
    if max_norm == 1e9:
        # Nothing was scaled.
        assert_same_params(ours, runs["plain"])


def test_a_clipping_serves_one_step_and_goes_with_its_gradients():
    ours, theirs = make_params(), make_params()
    optimizers = fused_adamw(ours), plain_adamw(theirs)
    for step, order in enumerate((("clip", "step"), ("step",), ("clip", "zero", "step"), ("clip", "clip", "step"))):
        give_gradients(step, ours, theirs)
        for call in order:
            if call == "clip":
                norm = optimizers[0].clip_next(0.5)
            elif call == "zero":
                optimizers[0].zero_grad()
                give_gradients(step, ours)
            else:
                optimizers[0].step()
        if order[-2:] == ("clip", "step"):
            scale = torch.clamp(0.5 / (norm + 1e-6), max=1.0)
            for param in theirs:
                param.grad *= scale
        optimizers[1].step()
        assert_same_params(ours, theirs)


def test_a_norm_that_is_not_finite_spoils_what_it_spoils_in_torch():
    for value in (float("inf"), float("nan")):
        ours, theirs = make_params(), make_params()
        give_gradients(0, ours, theirs)
        for run in (ours, theirs):
            run[1].grad[0] = value
        optimizer = fused_adamw(ours)
        assert not optimizer.clip_next(1.0).isfinite()
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        optimizer.step()
        plain_adamw(theirs).step()
        assert all(torch.equal(one.isnan(), other.isnan()) for one, other in zip(ours, theirs))


def test_without_gradients_the_norm_is_zero_and_a_step_changes_nothing():
    params = make_params()
    before, optimizer = copy.deepcopy(params), fused_adamw(params)
    assert torch.equal(optimizer.clip_next(1.0), torch.tensor(0.0))
    optimizer.step()
    assert_same_params(params, before)
    assert not any(optimizer.state.values())


def test_gradients_are_never_read_on_the_host():
    params = make_params()
    optimizer = fused_adamw(make_groups(params))
    # Tables are made on the host and sent.
    run_steps(optimizer, params, [0])
    with count_host_waits() as waits:
        for step in (2, 3):
            give_gradients(step, params)
            optimizer.clip_next(1.0)
            optimizer.step()
    assert not waits.count


# State.


def run_steps(optimizer, params, steps):
    for step in steps:
        give_gradients(step, params, missing={1} if step == 1 else ())
        optimizer.step()


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("first", ["ours", "plain", "fused"])
@pytest.mark.parametrize("second", ["ours", "plain"])
def test_a_run_goes_on_from_the_state_of_either_as_if_never_stopped(first, second):
    makers = {
        "ours": fused_adamw,
        "plain": plain_adamw,
        "fused": lambda params: torch.optim.AdamW(params, fused=True, **OPTIONS),
    }
    params = make_params()
    optimizer = makers[first](make_groups(params))
    run_steps(optimizer, params, range(4))
    optimizer.param_groups[1]["lr"] = 0.01
    resumed = copy.deepcopy(params)
    other = makers[second](make_groups(resumed))
    # A state of its own that must not survive.
    run_steps(other, resumed, range(2))
    for param, old in zip(resumed, params):
        param.data.copy_(old)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    whole, steps = params, optimizer
    if first == "fused":
        # The fused kernel of a CPU rounds in another order: go on from its state with the plain one.
        steps = plain_adamw(make_groups(params))
        state = optimizer.state_dict()
        for group in state["param_groups"]:
            group["fused"] = False
        steps.load_state_dict(state)
        if second == "plain":
            for group in other.param_groups:
                group["fused"] = False
    assert [group["lr"] for group in other.param_groups] == [0.05, 0.01]
    run_steps(steps, whole, range(4, 8))
    run_steps(other, resumed, range(4, 8))
    assert_same_params(resumed, whole)
    assert_same_state(other, steps)
    if second == "ours":
        assert all(set(group) == {"params", "lr", "betas", "eps", "weight_decay"} for group in other.param_groups)


@pytest.mark.parametrize(
    ("make", "dtype", "options"),
    [
        (make_params, torch.bfloat16, {}),
        (make_params, torch.bfloat16, {"master_weights": True}),
        (make_8bit_params, torch.float32, {"optim_bits": 8}),
        (make_8bit_params, torch.bfloat16, {"optim_bits": 8, "master_weights": True}),
    ],
)
def test_every_form_of_state_goes_on_from_a_file_as_if_never_stopped(make, dtype, options):
    params = make(dtype)
    optimizer = fused_adamw(params, **options)
    run_steps(optimizer, params, range(4))
    resumed = copy.deepcopy(params)
    other = fused_adamw(resumed, **options)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    other.load_state_dict(optimizer.state_dict())
    copied = copy.deepcopy(optimizer)
    assert {name: getattr(copied, name) for name in options} == options
    # Shared, each step of one would be a step of the other.
    run_steps(other, resumed, range(4, 8))
    run_steps(optimizer, params, range(4, 8))
    assert_same_params(resumed, params)
    assert_equal_states(other.state_dict(), optimizer.state_dict())


# Masters.


def test_masters_take_the_steps_of_fp32_weights_and_parameters_are_their_rounded_values():
    """Other dtypes go on as they are; copies of the same parameters are nobody's."""
    params = make_params(torch.bfloat16)
    params[1] = nn.Parameter(params[1].detach().float())
    wide = [nn.Parameter(param.detach().float()) for param in params]
    optimizer, plain = fused_adamw(make_groups(params), master_weights=True), fused_adamw(make_groups(wide))
    told = []
    optimizer.attach_copies(lambda: [(params[0], torch.zeros(SHAPES[0], dtype=torch.float16))], on_written=told.append)
    for step in range(8):
        give_gradients(step, params, missing=(2,) if step < 3 else ())
        for param, twin in zip(params, wide):
            twin.grad = None if param.grad is None else param.grad.float()
        assert torch.equal(optimizer.clip_next(5.0), plain.clip_next(5.0))
        optimizer.step()
        plain.step()
        masters = [optimizer.master_of(param) for param in params]
        assert masters[1] is params[1]
        assert_same_params(masters, wide)
        assert_same_params(params, [twin.to(param.dtype) for param, twin in zip(params, wide)])
    assert told == [[]] * 8
    assert all(
        state["master"].dtype is torch.float32 for param, state in optimizer.state.items() if param is not params[1]
    )
    assert [optimizer.state_bytes(param) for param in params[:2]] == [12 * 35, 8 * 5]


def test_changes_below_the_last_digit_add_up_with_masters_and_are_lost_without():
    found = {}
    for has_masters in (False, True):
        param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = FusedAdamW([param], lr=1e-4, weight_decay=0.0, master_weights=has_masters)
        for _ in range(100):
            param.grad = torch.ones_like(param)
            optimizer.step()
        found[has_masters] = param.detach().float()
    assert torch.equal(found[False], torch.ones(3))
    assert (found[True] - 0.99).abs().max() < 0.003


def test_states_with_and_without_masters_are_told_apart():
    params = make_params(torch.bfloat16)
    with_masters, without = fused_adamw(params, master_weights=True), fused_adamw(params)
    run_steps(without, params, range(2))
    # A state without masters is one from which they are made.
    with_masters.load_state_dict(without.state_dict())
    assert_same_params([with_masters.master_of(param) for param in params], [param.float() for param in params])
    run_steps(with_masters, params, range(2, 4))
    with pytest.raises(ResumeError, match="master_weights=True"):
        without.load_state_dict(with_masters.state_dict())


def test_a_parameter_that_somebody_else_has_written_is_taken_as_it_is():
    params = make_params(torch.bfloat16)
    optimizer = fused_adamw(params, master_weights=True)
    run_steps(optimizer, params, range(3))
    untouched = optimizer.master_of(params[0]).clone()
    with torch.no_grad():
        params[5].fill_(3.0)
    for param in params:
        param.grad = None
    params[5].grad = torch.zeros_like(params[5])
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(optimizer.master_of(params[5]), torch.full((4099,), 3.0))
    assert torch.equal(optimizer.master_of(params[0]), untouched)


def test_masters_are_kept_where_weights_are_loaded_behind_them_or_swapped_back():
    params = make_params(torch.bfloat16)
    optimizer = fused_adamw(params, master_weights=True)
    run_steps(optimizer, params, range(3))
    masters = [optimizer.master_of(param).clone() for param in params]
    saved, state = [param.detach().clone() for param in params], copy.deepcopy(optimizer.state_dict())
    resumed = make_params(torch.bfloat16)
    later = fused_adamw(resumed, master_weights=True)
    later.load_state_dict(state)
    with torch.no_grad():
        for swapped in (resumed, params):
            for param, values in zip(swapped, saved):
                param.zero_()
                param.copy_(values)
        for param in (resumed[5], params[5]):
            param[:2] = 3.0
    masters[5][:2] = 3.0
    for one, held in ((optimizer, params), (later, resumed)):
        one.param_groups[0]["lr"] = 0.0
        give_gradients(3, held, missing={1})
        one.step()
        assert_same_params([one.master_of(param) for param in held[2:]], masters[2:])
        assert_same_params(held[2:5], saved[2:5])


def test_a_step_that_is_skipped_leaves_masters_as_they_are():
    params = make_params(torch.bfloat16)
    optimizer = fused_adamw(params, master_weights=True)
    run_steps(optimizer, params, range(2))
    before = [(param.clone(), optimizer.master_of(param).clone()) for param in params]
    optimizer.attach_guard(lambda norm: torch.ones(()))
    run_steps(optimizer, params, range(2, 3))
    for param, (old, master) in zip(params, before):
        assert torch.equal(param, old)
        assert torch.equal(optimizer.master_of(param), master)


# Averages in 8 bits.


def fit_line(optimizer_of, *, num_steps=200):
    """Return the losses of a small regression, and its parameters: a matrix in 8 bits, a bias below their least
    size.
    """
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(256, 64, generator=generator)
    wanted = rows @ torch.randn(64, 80, generator=generator) + 1.0
    layer = nn.Linear(64, 80)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    optimizer, losses = optimizer_of(list(layer.parameters())), []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = (layer(rows) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, optimizer, [param.detach() for param in layer.parameters()]


def test_in_8_bits_a_fit_is_as_near_to_fp32_as_that_of_bitsandbytes():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    options = {"lr": 0.02, "weight_decay": 0.01}
    losses = fit_line(lambda params: FusedAdamW(params, **options))[0]
    ours, optimizer, params = fit_line(lambda params: FusedAdamW(params, optim_bits=8, **options))
    theirs, other, their_params = fit_line(lambda params: bitsandbytes.optim.AdamW8bit(params, **options))
    assert ours[-1] < 0.05 * ours[0]
    distance, their_distance = (abs(found[-1] / losses[-1] - 1) for found in (ours, theirs))
    assert distance <= max(2 * their_distance, 0.02)
    # The same numbers but for the last digits, which decide a code here and there.
    state, their_state = (each.state[next(iter(each.state))] for each in (optimizer, other))
    assert (state["exp_avg_absmax"] / their_state["absmax1"] - 1).abs().median() < 0.01
    assert all((one - their).norm() <= 0.01 * their.norm() for one, their in zip(params, their_params))


def test_small_parameters_keep_averages_in_fp32_and_state_bytes_counts_what_is_held():
    params = [
        nn.Parameter(torch.randn(63, 65)),
        nn.Parameter(torch.randn(64, 64)),
        nn.Parameter(torch.randn(5001).bfloat16()),
    ]
    optimizer = FusedAdamW(params, optim_bits=8, master_weights=True)
    expected = [optimizer.state_bytes(param) for param in params]
    give_gradients(0, params)
    optimizer.step()
    held = [
        sum(tensor.numel() * tensor.element_size() for name, tensor in optimizer.state[param].items() if name != "step")
        for param in params
    ]
    assert held == expected == [4095 * 8, 4096 * 2 + 16 * 8, 5001 * 2 + 20 * 8 + 5001 * 4]
    assert [optimizer.state[param]["exp_avg"].dtype for param in params] == [torch.float32, torch.uint8, torch.uint8]
    small = nn.Parameter(params[0].detach().clone())
    assert optimizer.state[params[1]]["exp_avg"].shape == params[1].shape
    plain = FusedAdamW([small])
    small.grad = params[0].grad.clone()
    before = small.detach().clone()
    plain.step()
    assert not torch.equal(small, before)
    assert torch.equal(plain.state[small]["exp_avg"], optimizer.state[params[0]]["exp_avg"])


def test_in_8_bits_clipping_copies_and_a_skipped_step_are_those_of_32():
    params = make_8bit_params()
    optimizer = fused_adamw(params, optim_bits=8)
    copies, told = [param.detach().bfloat16() for param in params], []
    optimizer.attach_copies(lambda: list(zip(params, copies)), on_written=told.append)
    optimizer.attach_guard(lambda norm: (~torch.isfinite(norm)).float())
    give_gradients(0, params)
    plain = copy.deepcopy(params)
    for one, other in zip(plain, params):
        one.grad = other.grad.clone()
    torch.testing.assert_close(optimizer.clip_next(0.5), torch.nn.utils.clip_grad_norm_(plain, 0.5))
    optimizer.step()
    others = fused_adamw(plain, optim_bits=8)
    others.step()
    assert all((one - other).abs().max() < 1e-5 for one, other in zip(params, plain))
    assert all(torch.equal(narrow, param.bfloat16()) for narrow, param in zip(copies, params))
    assert [len(written) for written in told] == [len(copies)]
    kept = copy.deepcopy([optimizer.state[param] for param in params])
    weights = [param.detach().clone() for param in params]
    give_gradients(1, params)
    params[0].grad[3, 3] = float("nan")
    optimizer.step()
    assert_same_params(params, weights)
    found = optimizer.state_dict()["state"]
    assert all(
        torch.equal(value, found[number][name]) for number, state in enumerate(kept) for name, value in state.items()
    )


def test_a_state_that_a_hook_gives_is_the_one_that_is_used():
    params = make_params()
    optimizer = fused_adamw(params)
    run_steps(optimizer, params, range(2))
    state = optimizer.state_dict()
    other = fused_adamw(make_params())

    def count_on(optimizer, given):
        return {
            **given,
            "state": {number: {**state, "step": state["step"] + 5} for number, state in given["state"].items()},
        }

    other.register_load_state_dict_pre_hook(count_on)
    other.load_state_dict(state)
    assert {float(state["step"]) for state in other.state.values()} == {6.0, 7.0}


def test_state_tensors_that_were_replaced_are_the_ones_that_are_stepped():
    # As Lightning does when it moves a state to a device.
    ours, theirs = make_params(), make_params()
    optimizers = fused_adamw(ours), plain_adamw(theirs)
    for step in range(4):
        give_gradients(step, ours, theirs)
        for optimizer in optimizers:
            for state in optimizer.state.values() if step == 2 else ():
                for name in AVERAGES:
                    state[name] = state[name].clone()
            optimizer.step()
    assert_same_params(ours, theirs)
    assert_same_state(*optimizers)


def test_a_deep_copy_goes_on_alone():
    params = make_params()
    optimizer = fused_adamw(params)
    optimizer.attach_copies(list, on_written=lambda copies: pytest.fail("the copy told the owner of the original"))
    give_gradients(0, params)
    twin, twins = copy.deepcopy((optimizer, params))
    give_gradients(0, twins)
    twin.step()
    plain = make_params()
    give_gradients(0, plain)
    plain_adamw(plain).step()
    assert_same_params(twins, plain)
    assert_same_params(params, make_params())


def state_of(make, *, make_params=make_params, **options):
    params = make_params()
    optimizer = make(params, **options)
    run_steps(optimizer, params, range(2))
    return optimizer.state_dict()


@pytest.mark.parametrize(
    ("state", "bits", "message"),
    [
        (lambda: state_of(torch.optim.SGD, lr=0.1, momentum=0.9), 32, "momentum_buffer"),
        (lambda: state_of(plain_adamw, amsgrad=True), 32, "amsgrad.*torch.optim.AdamW"),
        (lambda: state_of(plain_adamw, maximize=True), 32, "maximize.*torch.optim.AdamW"),
        (lambda: state_of(fused_adamw, make_params=make_8bit_params, optim_bits=8), 32, "in 8 bits.*optim_bits=8"),
        (lambda: state_of(fused_adamw, make_params=make_8bit_params), 8, "in 32 bits.*optim_bits=32"),
    ],
    ids=["sgd", "amsgrad", "maximize", "8 bits", "32 bits"],
)
def test_a_state_of_another_rule_or_form_is_refused_and_changes_nothing(state, bits, message):
    given = state()
    params = make_params() if len(given["state"]) > 3 else make_8bit_params()
    optimizer = fused_adamw(params, optim_bits=bits)
    run_steps(optimizer, params, range(3))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ResumeError, match=message):
        optimizer.load_state_dict(given)
    assert_equal_states(optimizer.state_dict(), before)


# What is kept between steps.


def replace_average(optimizer, params):
    optimizer.state[params[0]]["exp_avg"] = optimizer.state[params[0]]["exp_avg"] * 3.0


def write_average(optimizer, params):
    optimizer.state[params[0]]["exp_avg"].mul_(3.0)


def write_count(optimizer, params):
    optimizer.state[params[1]]["step"].fill_(7.0)


def replace_count(optimizer, params):
    optimizer.state[params[1]]["step"] = torch.tensor(7.0)


def forget_state(optimizer, params):
    del optimizer.state[params[2]]


def replace_parameter(optimizer, params):
    old, params[0] = params[0], nn.Parameter(params[0].detach() * 2.0)
    params[0].grad = old.grad
    for group in optimizer.param_groups:
        group["params"] = [params[0] if param is old else param for param in group["params"]]
    optimizer.state[params[0]] = optimizer.state.pop(old)


def move_parameter(optimizer, params):
    params[0].data = params[0].detach() * 2.0


def add_group(optimizer, params):
    params.append(nn.Parameter(torch.full((3, 5), 0.5)))
    params[-1].grad = torch.ones(3, 5)
    optimizer.add_param_group({"params": [params[-1]], "lr": 0.3})


def leave_out(optimizer, params):
    params[1].grad = None


def set_rate(optimizer, params):
    optimizer.param_groups[0]["lr"] = 0.7


def load_state(optimizer, params):
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        entry["exp_avg_sq"] *= 2.0
    optimizer.load_state_dict(state)


@pytest.mark.parametrize(
    "change",
    [
        replace_average, write_average, write_count, replace_count, forget_state, replace_parameter, move_parameter,
        add_group, leave_out, set_rate, load_state,
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_after_clipping", [False, True])
def test_a_change_between_steps_is_seen(change, is_after_clipping):
    ours, theirs = make_params(), make_params()
    pairs = [(ours, fused_adamw(make_groups(ours))), (theirs, plain_adamw(make_groups(theirs)))]
    for step in range(6):
        for params, optimizer in pairs:
            give_gradients(step, params)
            if is_after_clipping and params is ours:
                optimizer.clip_next(1e9)
            if step in (2, 4):
                change(optimizer, params)
            optimizer.step()
    assert_same_params(ours, theirs)


def test_steps_that_are_skipped_after_a_save_are_not_counted():
    params = make_params()
    optimizer = fused_adamw(params)
    is_bad = torch.zeros(())
    optimizer.attach_guard(lambda norm: is_bad.clone())
    for step, bad in enumerate((0.0, 1.0, 0.0, 1.0)):
        give_gradients(step, params)
        is_bad.fill_(bad)
        optimizer.step()
        counts = {int(entry["step"]) for entry in optimizer.state_dict()["state"].values()}
        assert counts == {1 + step // 2}


# Tables, closures, copies.


def test_parameters_that_skipped_other_steps_are_stepped_by_their_own_counts():
    """Of two parameters with two guarded steps each, one was skipped once: bias corrections differ."""
    ours, theirs = ([nn.Parameter(torch.ones(4)) for _ in range(2)] for _ in range(2))
    fused, plain = fused_adamw(ours), plain_adamw(theirs)
    for members, is_skipped in (((0,), True), ((1,), False), ((0, 1), False), ((0, 1), False)):
        give_gradients(len(members), ours, theirs, missing={0, 1} - {*members})
        fused.found_inf = torch.tensor(float(is_skipped))
        fused.step()
        if not is_skipped:
            plain.step()
    assert_same_params(ours, theirs)
    assert [int(state["step"]) for state in fused.state_dict()["state"].values()] == [2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_are_kept_while_the_same_parameters_have_gradients(monkeypatch, dtype):
    made, real = [], adamw_parts.TensorTable
    monkeypatch.setattr(adamw_parts, "TensorTable", lambda *args, **kwargs: made.append(1) or real(*args, **kwargs))
    params = make_params(dtype)
    optimizer = fused_adamw(make_groups(params), master_weights=dtype is torch.bfloat16)
    for step in range(5):
        give_gradients(step, params)
        optimizer.clip_next(1.0)
        optimizer.step()
    assert len(made) == 2
    optimizer.release()
    give_gradients(5, params)
    optimizer.step()
    assert len(made) == 4


def test_a_closure_has_gradients_may_clip_and_its_loss_comes_back():
    ours, theirs = make_params(), make_params()
    optimizer = fused_adamw(ours)

    def closure():
        optimizer.zero_grad()
        loss = sum(param.square().sum() for param in ours)
        loss.backward()
        norms.append(optimizer.clip_next(1.0))
        return loss

    norms = []
    loss = optimizer.step(closure)
    assert loss.item() == pytest.approx(sum(float(param.detach().square().sum()) for param in theirs), rel=1e-5)
    for param in theirs:
        param.grad = 2 * param.detach() * torch.clamp(1.0 / (norms[0] + 1e-6), max=1.0)
    plain_adamw(theirs).step()
    assert_same_params(ours, theirs)


def test_copies_are_written_in_the_step_and_their_owner_is_told_which():
    params = make_params()
    narrow = [
        torch.zeros(shape, dtype=torch.float16 if index == 2 else torch.bfloat16) for index, shape in enumerate(SHAPES)
    ]
    second, wide, foreign = (
        torch.zeros(SHAPES[0]).bfloat16(),
        torch.zeros(SHAPES[1]).double(),
        torch.zeros(2).bfloat16(),
    )
    pairs = [(param, copy) for index, (param, copy) in enumerate(zip(params, narrow)) if index != 1]
    pairs += [(params[0], second), (params[1], wide), (nn.Parameter(torch.ones(2)), foreign)]
    told = []
    optimizer = fused_adamw(make_groups(params))
    optimizer.attach_copies(lambda: pairs, on_written=told.append)
    give_gradients(0, params, missing={3})
    optimizer.step()
    written = {id(narrow[index]) for index in (0, 2, 4, 5)}
    assert len(told) == 1
    assert {id(copy) for copy in told[0]} == written
    assert all(torch.equal(copy, param.to(copy.dtype)) for param, copy in pairs if id(copy) in written)
    assert not any(copy.any() for copy in (narrow[3], second, wide, foreign))
    # Another copy takes the place of the first.
    old, pairs[0] = narrow[0].clone(), (params[0], second)
    give_gradients(1, params, missing={3})
    optimizer.step()
    assert torch.equal(second, params[0].bfloat16())
    assert torch.equal(narrow[0], old)
    plain = make_params()
    stepper = plain_adamw(make_groups(plain))
    for step in range(2):
        give_gradients(step, plain, missing={3})
        stepper.step()
    assert_same_params(params, plain)


# Refusals.


class Wrapped(nn.Parameter):
    """A tensor of another kind, as a DTensor is."""


@pytest.mark.parametrize(
    "param",
    [
        torch.ones(2).half(),
        torch.ones(2).double(),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, dtype=torch.int64),
        torch.ones(2, 3).T,
        torch.ones(2, 2).to_sparse(),
        Wrapped(torch.ones(2)),
    ],
)
def test_parameters_that_one_pass_cannot_step_are_refused(param):
    with pytest.raises(OptionError, match=r"params\[1\].*torch\.optim\.AdamW"):
        FusedAdamW([torch.ones(2), param])
    optimizer = FusedAdamW([torch.ones(2)])
    with pytest.raises(OptionError, match=r"torch\.optim\.AdamW"):
        optimizer.add_param_group({"params": param})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"lr": -1.0}, "lr"),
        ({"lr": "fast"}, "lr"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": (-0.1, 0.9)}, "betas"),
        ({"eps": -1.0}, "eps"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"amsgrad": True}, r"torch\.optim\.AdamW"),
        ({"maximize": True}, r"torch\.optim\.AdamW"),
        ({"master_weights": 1}, "master_weights"),
        *(({"optim_bits": value}, "optim_bits") for value in (4, 16, True, "8")),
    ],
)
def test_impossible_options_are_refused(options, word):
    if options.keys() & {"master_weights", "optim_bits"}:
        params = [torch.ones(2)]
    else:
        params, options = [{"params": [torch.ones(2)], **options}], {}
    with pytest.raises(OptionError, match=word):
        FusedAdamW(params, **options)


def test_impossible_defaults_are_refused():
    with pytest.raises(OptionError, match="lr"):
        FusedAdamW([torch.ones(2)], lr=-1.0)


@pytest.mark.parametrize("max_norm", [-1.0, float("nan"), None])
def test_an_impossible_norm_is_refused(max_norm):
    with pytest.raises(OptionError, match="max_norm"):
        FusedAdamW([torch.ones(2)]).clip_next(max_norm)


@pytest.mark.parametrize("grad", [torch.ones(3, 3).to_sparse(), torch.ones(()).expand(3, 3)])
def test_gradients_that_one_pass_cannot_read_are_refused(grad):
    param = nn.Parameter(torch.ones(3, 3))
    optimizer = FusedAdamW([param])
    param.grad = grad
    for call in (optimizer.step, lambda: optimizer.clip_next(1.0)):
        with pytest.raises(OptionError, match=r"torch\.optim\.AdamW"):
            call()
    assert torch.equal(param, torch.ones(3, 3))


def test_parameters_of_several_devices_are_refused(monkeypatch):
    params = make_params()
    optimizer = fused_adamw(make_groups(params))
    give_gradients(0, params)
    devices = iter(("cpu", "cuda:1"))
    monkeypatch.setattr(
        adamw_parts, "TensorTable", lambda *args, **kwargs: SimpleNamespace(device=torch.device(next(devices)), rows=())
    )
    with pytest.raises(OptionError, match=r"cuda:1.*torch\.optim\.AdamW"):
        optimizer.step()
