"""Twins of optimizers on the meta device: the state that the optimizers really make, and originals left alone."""

import pytest
import torch
from torch import nn

from lightning_fastft.core.optimizer_twin import OptimizerTwin, copy_without_state, is_known, measure_state

# Name, options; of torch.optim.
TORCH = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9}),
    ("Adam", {}),
    ("AdamW", {}),
    ("AdamW", {"amsgrad": True}),
    ("AdamW", {"fused": True}),
    ("AdamW", {"foreach": True}),
    ("AdamW", {"lr": torch.tensor(1e-3)}),
    ("Adafactor", {}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("RMSprop", {}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Adagrad", {}),
    ("Adadelta", {}),
    ("Adamax", {}),
]
BITSANDBYTES = [
    *("Adam", "Adam8bit", "Adam32bit", "AdamW", "AdamW8bit", "AdamW32bit", "AdEMAMix", "AdEMAMix8bit"),
    *("Lion", "Lion8bit", "RMSprop", "RMSprop8bit", "Adagrad", "Adagrad8bit"),
    *("PagedAdam", "PagedAdam8bit", "PagedAdamW", "PagedAdamW8bit", "PagedAdamW32bit", "PagedLion", "PagedLion8bit"),
]


def make_params(*, num_dims=(1, 2)):
    """Return parameters around the sizes from which moments have 8 bits and are paged."""
    shapes = [(64,), (64, 63), (64, 64), (64, 65), (64, 65), (300, 1024)]
    shapes = [shape for shape in shapes if len(shape) in num_dims]
    dtypes = [torch.float32, torch.bfloat16]
    return [nn.Parameter(torch.ones(shape, dtype=dtypes[i % 2])) for i, shape in enumerate(shapes)]


def real_bytes(optimizer, params):
    """Return the bytes of the tensors of each parameter's state after a step, without counts; shared ones once."""
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    seen, found = set(), []
    for param in params:
        tensors = [value for value in optimizer.state[param].values() if isinstance(value, torch.Tensor) and value.ndim]
        found.append(sum(tensor.nbytes for tensor in tensors if id(tensor) not in seen))
        seen.update(map(id, tensors))
    return found


@pytest.mark.parametrize(("name", "options"), TORCH, ids=lambda value: str(value))
def test_the_state_of_an_optimizer_of_torch_is_counted(name, options):
    params = make_params()
    optimizer = getattr(torch.optim, name)(params, **options)
    state = measure_state(optimizer)
    assert {each.paged for each in state} == {0}
    assert [each.device for each in state] == real_bytes(optimizer, params)


def test_the_state_of_muon_is_counted():
    params = make_params(num_dims=(2,))
    optimizer = torch.optim.Muon(params)
    assert [each.device for each in measure_state(optimizer)] == real_bytes(optimizer, params)


@pytest.mark.parametrize("name", BITSANDBYTES)
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_the_state_of_an_optimizer_of_bitsandbytes_is_counted(name):
    optim = pytest.importorskip("bitsandbytes.optim")
    params = make_params()
    optimizer = getattr(optim, name)(params, lr=1e-3)
    state = measure_state(optimizer)
    # On a CPU the real one pages nothing.
    assert [each.device + each.paged for each in state] == real_bytes(optimizer, params)
    # Of the one large parameter, all but the scales of blocks.
    num_moments = 1 if "Lion" in name else 2
    paged = num_moments * params[-1].numel() * (1 if "8bit" in name else 4)
    assert [each.paged for each in state] == [0] * 5 + [paged if "Paged" in name else 0]


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_the_original_is_left_alone():
    optim = pytest.importorskip("bitsandbytes.optim")
    params = make_params()
    optimizer = optim.PagedAdamW8bit(params, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    before = [param.detach().clone() for param in params]
    measure_state(optimizer)
    assert not optimizer.state
    assert optimizer.is_paged
    assert not calls
    assert {codes.device.type for codes in optimizer.name2qmap.values()} == {"cpu"}
    assert all(param.grad is None and torch.equal(param, old) for param, old in zip(params, before))
    assert all(group["params"][0].device.type == "cpu" for group in optimizer.param_groups)
    # It still makes its own steps, and its scheduler counts them.
    real_bytes(optimizer, params)
    assert calls == [1]
    scheduler.step()


def test_parameters_of_one_form_share_twins_or_have_each_its_own():
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(4, 4)) for _ in range(3)])
    twins = [OptimizerTwin(optimizer, shares_twins=shares) for shares in (True, False)]
    for twin in twins:
        twin.step()
    assert [len(twin.parameters) for twin in twins] == [2, 3]
    assert twins[0].state_bytes() == twins[1].state_bytes()


def test_values_that_a_step_reads_are_counted():
    param = nn.Parameter(torch.ones(4, 4))
    assert OptimizerTwin(torch.optim.AdamW([param])).step() == 0
    assert OptimizerTwin(torch.optim.Adafactor([param])).step() > 0


def test_an_optimizer_that_makes_no_step_on_the_meta_device_has_no_count():
    params = make_params()
    assert measure_state(torch.optim.LBFGS(params)) is None
    optim = pytest.importorskip("bitsandbytes.optim")
    assert measure_state(optim.LAMB(params)) is None


def test_known_optimizers_are_those_of_torch_and_bitsandbytes():
    class Own(torch.optim.SGD):
        pass

    params = make_params()
    assert is_known(torch.optim.AdamW(params))
    assert not is_known(Own(params))
    assert copy_without_state(Own(params)).param_groups[0]["params"] == params
    optim = pytest.importorskip("bitsandbytes.optim")
    assert is_known(optim.AdamW8bit(params))
