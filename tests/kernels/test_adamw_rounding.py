"""Stochastic rounding of bf16 weights: its random numbers, its mean, and one set of bits for every split of a tensor."""

import itertools

import pytest
import torch

from lightning_fastft.core.errors import OptionError, ShapeError
from lightning_fastft.kernels.adamw_step import codes, op, reference
from lightning_fastft.kernels.adamw_step.op import adamw_step
from lightning_fastft.kernels.adamw_step.reference import SkipFlag, StepOptions
from lightning_fastft.kernels.adamw_step.rounding import philox, random_halves, round_stochastically
from lightning_fastft.kernels.adamw_step.table import CHUNK, TensorTable

SEED = 2**40 + 3
OPTIONS = StepOptions(learning_rate=0.01, weight_decay=0.1, step=4, rounding_seed=SEED)
SIZE = 2 * CHUNK + 301


def make_table(starts=(0, SIZE), *, number=5, is_8bit=False, dtype=torch.bfloat16, device="cpu"):
    """A tensor in the middle of a run, in pieces that begin at the starts; its values and its table."""
    torch.manual_seed(3)
    param = torch.randn(SIZE).to(device, dtype)
    param.grad = torch.randn(SIZE).to(device, dtype)
    averages = torch.randn(SIZE).to(device) * 0.1, torch.rand(SIZE).to(device)
    spans = [slice(*span) for span in itertools.pairwise(starts)]
    pieces = [[average[span].clone() for span in spans] for average in averages]
    absmaxs = {}
    if is_8bit:
        encoded = [[codes.encode(piece, is_signed=not sq) for piece in held] for sq, held in enumerate(pieces)]
        pieces = [[code for code, _ in held] for held in encoded]
        found = [[absmax_B for _, absmax_B in held] for held in encoded]
        absmaxs = dict(zip(("exp_avg_absmaxs", "exp_avg_sq_absmaxs"), found))
    table = TensorTable(
        [param[span] for span in spans],
        exp_avgs=pieces[0],
        exp_avg_sqs=pieces[1],
        owners=[param] * len(spans),
        numbers=[number] * len(spans),
        firsts=starts[:-1],
        starts=starts[:-1],
        **absmaxs,
    )
    return param, table


def step(functions, options=OPTIONS, skip=None, **kind):
    param, table = make_table(**kind)
    functions.adamw_step(table, options=options, skip=skip)
    return param


def check_rounding(functions, *, is_8bit, device="cpu"):
    kind = {"is_8bit": is_8bit, "device": device}
    ours, truth = step(functions, **kind), step(reference, **kind)
    # The new values differ in the last bit of fp32 here and there, which decides one of 65536 roundings.
    assert (ours != truth).sum() <= (0 if device == "cpu" else 4)
    assert (ours != step(functions, number=6, **kind)).sum() > 1000
    assert (ours != step(functions, OPTIONS._replace(rounding_seed=SEED - 2**40), **kind)).sum() > 1000
    assert torch.equal(step(functions, starts=(0, CHUNK, SIZE), **kind), ours)
    zero = torch.zeros((), device=device)
    skipped = SkipFlag(zero, zero.double() + 3)
    assert torch.equal(step(functions, OPTIONS._replace(step=7), skipped, **kind), ours)
    plain = OPTIONS._replace(rounding_seed=None)
    wide = kind | {"dtype": torch.float32}
    assert torch.equal(step(functions, **wide), step(functions, plain, **wide))


@pytest.fixture(autouse=True)
def _no_graph():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("is_8bit", [False, True])
def test_every_split_and_skipped_steps_have_the_same_bits(is_8bit):
    check_rounding(op, is_8bit=is_8bit)


def test_words_are_those_of_philox():
    # Known answers of Random123: the counter and the key of all ones.
    ones = [torch.full((1,), 2**32 - 1)] * 4
    words = [word.item() for word in philox(ones, seed=2**64 - 1)]
    assert words == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_random_numbers_are_uniform_and_differ_by_step_number_and_seed():
    given = {"seed": 1, "step": 2, "number": 3, "first": 0}
    noise = random_halves((2**16,), **given)
    counts = torch.bincount(noise >> 8, minlength=256).double()
    # 255 degrees of freedom: mean 255, standard deviation 22.6.
    assert ((counts - 256).square() / 256).sum() < 255 + 5 * 22.6
    for change in ({"seed": 2}, {"step": 3}, {"number": 4}, {"first": 8}, {"seed": 1 + 2**32}):
        assert (random_halves((2**16,), **given | change) == noise).float().mean() < 1e-3


def test_the_mean_is_the_value_and_no_result_is_further_than_its_neighbour():
    values = torch.randn(64) * 10.0 ** torch.arange(-8, 8).repeat(4)
    noise = random_halves((4096, 64), seed=7, step=1, number=0, first=0)
    rounded = round_stochastically(values.expand(4096, 64).contiguous(), noise).float()
    low = (values.view(torch.int32) & -65536).view(torch.float32)
    high = ((values.view(torch.int32) & -65536) + 65536).view(torch.float32)
    assert ((rounded == low) | (rounded == high)).all()
    # The standard error of a mean of 4096 is at most 1/128 of the distance between the neighbours.
    assert ((rounded.double().mean(0) - values) / (high - low)).abs().max() < 5 / 128


def test_values_of_bf16_and_what_is_not_finite_stay():
    values = torch.tensor([0.0, -0.0, 1.0, -3.0, float("inf"), float("-inf"), float("nan")])
    rounded = round_stochastically(values, torch.full((7,), 65535, dtype=torch.int32))
    assert torch.equal(rounded[:6], values[:6].bfloat16())
    assert rounded[6].isnan()


def test_changes_below_half_a_unit_add_up_on_average():
    param = torch.ones(CHUNK, dtype=torch.bfloat16)
    param.grad = torch.ones_like(param)
    moments = {"exp_avgs": [torch.zeros(CHUNK)], "exp_avg_sqs": [torch.zeros(CHUNK)]}
    table = TensorTable([param], **moments)
    for number in range(50):
        options = StepOptions(learning_rate=1e-4, weight_decay=0.0, step=number + 1, rounding_seed=0)
        adamw_step(table, options=options)
    assert param.float().mean().item() == pytest.approx(1 - 50e-4, abs=2e-4)


def test_impossible_places_are_refused():
    with pytest.raises(ShapeError, match="multiple of 8"):
        make_table(starts=(4, SIZE))
    with pytest.raises(ShapeError, match="elements from"):
        TensorTable(
            [torch.ones(8)],
            exp_avgs=[torch.ones(8)],
            exp_avg_sqs=[torch.ones(8)],
            owners=[torch.ones(12)],
            starts=[8],
        )
    with pytest.raises(OptionError, match="rounding_seed"):
        step(op, OPTIONS._replace(rounding_seed=-1))
