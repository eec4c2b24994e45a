"""FusedAdamW with moments on the host: the numbers, state and files of moments on the device, for every share."""

import copy
import io
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_fastft.core.errors import OptionError
from lightning_fastft.kernels.adamw_step.table import CHUNK
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.optimization import host_moments
from lightning_fastft.training.optimizer import FusedAdamW
from tests.support.host_waits import count_host_waits
from tests.support.late_streams import LateStreams

SHAPES = ((2, CHUNK), (7,), (CHUNK + 40,), (70, 70), (64, 64))
ROUNDED = {"rounding": "stochastic", "rounding_seed": 11}
KINDS = {
    "8 bits, rounded": (torch.bfloat16, {"optim_bits": 8, **ROUNDED}),
    "8 bits, masters": (torch.bfloat16, {"optim_bits": 8, "master_weights": True}),
    "32 bits": (torch.float32, {}),
}


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    # Pieces of one chunk: four parameters have seven.
    monkeypatch.setattr(host_moments, "PIECE_BYTES", 1)


@pytest.fixture
def late_streams(request, monkeypatch):
    """Copies that run as late as marks allow, with a seed some of them earlier, so that a wait that is missing shows."""
    streams = LateStreams(seed=getattr(request, "param", None))
    monkeypatch.setattr(host_moments, "make_copy_streams", lambda device: streams)
    return streams


def make(kind, *, offload):
    dtype, options = KINDS[kind]
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    return params, FusedAdamW(params, lr=0.01, weight_decay=0.1, **options, offload=offload)


def run(params, optimizer, steps):
    """Clipped steps; the third is skipped, the fourth has no gradient of the first parameter. Returns the norms."""
    norms = []
    optimizer.attach_guard(lambda norm: (~torch.isfinite(norm)).float())
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        if step == 2:
            params[2].grad[0] = float("inf")
        if step == 3:
            params[0].grad = None
        norms.append(optimizer.clip_next(1.0))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(norms)


def write(params, values):
    with torch.no_grad():
        for param, value in zip(params, values):
            param.copy_(value)


def assert_same(one, other):
    (params, optimizer), (others, second) = one, other
    assert all(torch.equal(param, twin) for param, twin in zip(params, others))
    states = [each.state_dict() for each in (optimizer, second)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert states[0]["state"].keys() == states[1]["state"].keys()
    for number, state in states[0]["state"].items():
        twin = states[1]["state"][number]
        assert state.keys() == twin.keys()
        assert all(one.dtype is twin[name].dtype and torch.equal(one, twin[name]) for name, one in state.items())


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()))


@pytest.mark.covering
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("share", "late_streams"), [(0.5, 5), (1.0, None)], indirect=["late_streams"])
def test_every_share_has_the_numbers_and_files_of_moments_on_the_device(kind, share, late_streams):
    plain, ours = make(kind, offload=0.0), make(kind, offload=share)
    assert torch.equal(run(*plain, range(6)), run(*ours, range(6)))
    assert late_streams.num_copies > 60
    assert_same(plain, ours)


@pytest.mark.parametrize("first", [0.0, 1.0])
def test_a_run_goes_on_from_a_file_across_the_option(first, late_streams):
    kind = "8 bits, rounded"
    whole = make(kind, offload=0.0)
    run(*whole, range(7))
    params, optimizer = make(kind, offload=first)
    run(params, optimizer, range(4))
    resumed = make(kind, offload=1.0 - first)
    # An optimizer that has made steps loads the state too.
    run(*resumed, range(1))
    write(resumed[0], params)
    resumed[1].load_state_dict(through_a_file(optimizer.state_dict()))
    run(*resumed, range(4, 7))
    assert_same(whole, resumed)


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_that_loads_a_state_from_before_its_steps_begins_with_zeros(kind, late_streams):
    plain, ours = make(kind, offload=0.0), make(kind, offload=1.0)
    first = [param.detach().clone() for param in ours[0]]
    before = copy.deepcopy(ours[1].state_dict())
    run(*ours, range(3))
    write(ours[0], first)
    # As LearningRateFinder does behind its trial.
    ours[1].load_state_dict(before)
    for pair in (plain, ours):
        run(*pair, range(3, 6))
    assert_same(plain, ours)


def test_a_moved_copied_or_released_state_goes_on(late_streams):
    kind = "8 bits, rounded"
    plain, ours = make(kind, offload=0.0), make(kind, offload=1.0)
    run(*plain, range(3))
    run(*ours, range(3))
    ours[1].release()
    # Lightning moves a state in the same way: it replaces the host tensors.
    for state in ours[1].state.values():
        state.update({name: tensor.clone() for name, tensor in state.items()})
    copied = copy.deepcopy(ours)
    assert copied[1].offload == 1.0
    for pair in (plain, ours, copied):
        run(*pair, range(3, 6))
    assert_same(plain, ours)
    assert_same(plain, copied)


def test_memory_counts_what_the_device_holds():
    params, optimizer = make("8 bits, rounded", offload=0.3)
    plain, other = make("8 bits, rounded", offload=0.0)
    counts = [optimizer.state_bytes(param) for param in params]
    assert other.host_bytes() == 0
    run(params, optimizer, range(1))
    held = [tensor for name, tensor in optimizer.state[params[0]].items() if name != "step"]
    assert optimizer.host_bytes() == sum(tensor.nbytes for tensor in held)
    # Three slots, each with one chunk of codes and its 16 magnitudes, of both moments.
    assert counts[0] == 3 * 2 * (CHUNK + 512)
    assert counts[1:] == [other.state_bytes(param) for param in plain[1:]]


def test_a_step_has_no_host_sync():
    for offload in (0.0, 1.0):
        params, optimizer = make("8 bits, rounded", offload=offload)
        run(params, optimizer, range(1))
        for param in params:
            param.grad = torch.ones_like(param)
        with count_host_waits() as waits:
            optimizer.clip_next(1.0)
            optimizer.step()
        assert not waits.count


def test_a_strategy_leaves_loaded_moments_on_the_host():
    params, optimizer = make("8 bits, rounded", offload=1.0)
    run(params, optimizer, range(2))
    strategy = FastFTStrategy()
    state = through_a_file(optimizer.state_dict())
    with mock.patch("lightning.pytorch.strategies.strategy._optimizer_to_device") as move:
        strategy.optimizers = [optimizer]
        strategy.load_optimizer_state_dict({"optimizer_states": [state]})
        assert not move.called
        strategy.optimizers = [make("8 bits, rounded", offload=0.0)[1]]
        strategy.load_optimizer_state_dict({"optimizer_states": [state]})
        assert move.called


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"offload": 1.5}, "offload"),
        ({"offload": True}, "offload"),
        ({"rounding": "up"}, "rounding"),
        ({"rounding_seed": -1}, "rounding_seed"),
        ({"rounding": "stochastic", "master_weights": True}, "master_weights"),
    ],
)
def test_impossible_options_are_refused(options, word):
    with pytest.raises(OptionError, match=word):
        FusedAdamW([torch.ones(2)], **options)
