"""FiniteGuard: a step whose loss or gradients are not finite changes no bit, is not counted, and names its packs;
the faults are real ones.
"""

import functools
import itertools
import json
import os
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader

from lightning_fastft.callbacks.finite_guard import FiniteGuard
from lightning_fastft.callbacks.gradient_health import GradientHealth
from lightning_fastft.core.errors import NotTrainingError
from lightning_fastft.kernels.adamw_step.op import grad_norm
from lightning_fastft.strategies.registry import register_strategies
from lightning_fastft.training.optimizer import FusedAdamW
from tests.support.fine_tuners import trainable, tuner
from tests.support.host_waits import count_host_waits
from tests.support.rank_exit import leave
from tests.support.training_parts import (
    PlainModule,
    packed_batches,
    packed_loader,
    quiet_data,
    quiet_trainer,
    tiny_llama,
)
from tests.support.two_ranks import run_two_ranks

WIDTH, ROWS, NUM_PARTS = 6, 4, 2
NUM_RANKS = 2


def overflow(hidden, dtype):
    """A product of two finite numbers that the dtype cannot hold, as a narrow matmul makes it."""
    large = torch.full_like(hidden, torch.finfo(dtype).max / 2).to(dtype)
    return (large * (hidden.abs() + 8.0).to(dtype)).float().mean()


# What a bad micro-batch adds to its loss; the last three leave the loss finite.
FAULTS = {
    "NaN row": lambda module, hidden: 0.0,
    "infinite row": lambda module, hidden: 0.0,
    "NaN loss": lambda module, hidden: torch.tensor(-1.0).log(),
    "infinite loss": lambda module, hidden: torch.tensor(1e3).exp(),
    "fp16 overflow": lambda module, hidden: overflow(hidden, torch.float16),
    "bf16 overflow": lambda module, hidden: overflow(hidden, torch.bfloat16),
    "NaN in one gradient": lambda module, hidden: (module.last.bias[0] * 0.0).sqrt(),
    "infinity in one gradient": lambda module, hidden: (module.last.bias[0] - module.last.bias[0].detach()).sqrt(),
}
FINITE_LOSS = list(FAULTS)[-2:]
OPTIMIZERS = {
    "FusedAdamW": FusedAdamW,
    "torch, fused": functools.partial(torch.optim.AdamW, fused=True),
    "fused, with momentum": functools.partial(torch.optim.SGD, momentum=0.9, fused=True),
    "without a flag": functools.partial(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
}
CLIPPING = {
    "none": {},
    "norm": {"gradient_clip_val": 0.05},
    "value": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
}
# 40 of them: every fault, at both ends of a window, for optimizers that take the flag; the fourth part of them for one
# that does not.
CASES = [
    (fault, position, optimizer, list(CLIPPING)[2 - number % 3])
    for number, (fault, position, optimizer) in enumerate(
        itertools.product(FAULTS, (0, 1), ("FusedAdamW", "torch, fused"))
    )
] + [(fault, 1, "without a flag", "norm") for fault in FAULTS]


class Net(pl.LightningModule):
    """Two layers on rows of numbers; a bad batch says what is wrong with it."""

    def __init__(self, optimizer):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last, self.rare = (
            torch.nn.Linear(WIDTH, WIDTH),
            torch.nn.Linear(WIDTH, 1),
            torch.nn.Linear(1, 1),
        )
        self.optimizer = optimizer

    def training_step(self, batch, batch_idx):
        x, fault, has_rare = batch
        hidden = torch.tanh(self.first(x))
        loss = self.last(hidden).square().mean()
        if has_rare:
            loss = loss + self.rare(torch.ones(1)).square().sum()
        return loss if fault is None else loss + self.fault(fault, hidden)

    def fault(self, name, hidden):
        return FAULTS[name](self, hidden)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        if isinstance(optimizer, FusedAdamW) and gradient_clip_val and gradient_clip_algorithm != "value":
            # As FineTuner does.
            optimizer.clip_next(gradient_clip_val)
        else:
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def configure_optimizers(self):
        return OPTIMIZERS[self.optimizer](self.parameters(), lr=0.05)


def window(number, *, fault=None, position=0, has_rare=(True, True), num_parts=NUM_PARTS):
    """The micro-batches of one step; with a fault, one of them is bad."""
    batches = []
    for part in range(num_parts):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * number + part))
        is_bad = fault is not None and part == position
        if is_bad and fault.endswith("row"):
            x[1] = float("nan") if fault.startswith("NaN") else float("inf")
        batches.append((x, fault if is_bad else None, has_rare[part]))
    return batches


def bits_of(module, optimizer):
    """Every number that a step may change."""
    found = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    for number, state in enumerate(optimizer.state.values()):
        found |= {
            f"{number} {name}": value.clone()
            for name, value in state.items()
            if torch.is_tensor(value) and name != "step"
        }
    return found


def differing(one, other):
    return [
        name
        for name in one.keys() | other.keys()
        if name not in one or name not in other or not torch.equal(one[name], other[name])
    ]


class Recorder(Callback):
    """What a step may change, after each step."""

    def __init__(self):
        self.after = []

    def on_train_start(self, trainer, pl_module):
        self.after.append(bits_of(pl_module, trainer.optimizers[0]))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if len(self.after) <= trainer.global_step:
            self.after.append(bits_of(pl_module, trainer.optimizers[0]))


def train(tmp_path, windows, *, optimizer="FusedAdamW", clipping="none", guard=None, callbacks=(), **options):
    guard = FiniteGuard(check_every_n_steps=2, unsupported="wait") if guard is None else guard
    recorder, module = Recorder(), Net(optimizer)
    batches = [batch for batches in windows for batch in batches]
    trainer = quiet_trainer(
        tmp_path,
        max_steps=len(windows),
        accumulate_grad_batches=len(windows[0]),
        callbacks=[*callbacks, *([guard] if guard else []), recorder],
        **CLIPPING[clipping],
        **options,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(batches, batch_size=None))
    told = [str(warning.message) for warning in caught if "FiniteGuard" in str(warning.message)]
    return recorder.after, trainer.optimizers[0].state_dict(), told, guard


@pytest.fixture(scope="module")
def clean_run(tmp_path_factory):
    """The run that never saw the bad pack, each kind once."""
    return functools.cache(
        lambda optimizer, clipping: train(
            tmp_path_factory.mktemp("clean"),
            [window(number) for number in range(4)],
            optimizer=optimizer,
            clipping=clipping,
            guard=False,
        )
    )


def same_states(one, other):
    return all(
        torch.equal(state[name], other["state"][key][name])
        for key, state in one["state"].items()
        for name in state
        if state[name] is not None
    )


@pytest.mark.parametrize(("fault", "position", "optimizer", "clipping"), CASES)
def test_a_bad_step_changes_nothing(tmp_path, clean_run, fault, position, optimizer, clipping):
    windows = [window(0), window(1), window(9, fault=fault, position=position), window(2), window(3)]
    after, state, told, guard = train(tmp_path, windows, optimizer=optimizer, clipping=clipping)
    # Averages of a weight that begin as zeros are made by the first step.
    assert differing(after[2], after[3]) == []
    assert len(differing(after[3], after[4])) > 0
    clean, clean_state, _, _ = clean_run(optimizer, clipping)
    assert differing(after[5], clean[4]) == []
    assert same_states(state, clean_state)
    assert (guard.num_steps, guard.num_skipped) == (5, 1)
    kind = "gradients" if fault in FINITE_LOSS else "loss"
    assert [
        text
        for text in told
        if f"step 3 was skipped: {kind} not finite" in text and "rank 0: batch 4 of its epoch, batch 5" in text
    ] == told
    assert len(told) == 1


def test_there_are_forty_cases():
    assert len(CASES) == len(set(CASES)) == 40
    print(f"R7: {len(CASES)} bad steps, each in a training run of its own")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_first_step_may_be_bad(tmp_path, optimizer):
    windows = [window(9, fault="NaN row"), window(0), window(1)]
    after, state, _, _ = train(tmp_path, windows, optimizer=optimizer)
    clean, clean_state, _, _ = train(tmp_path, windows[1:], optimizer=optimizer, guard=False)
    assert differing(after[3], clean[2]) == []
    assert same_states(state, clean_state)


def test_counts_are_those_of_each_weight(tmp_path):
    """A weight without gradient in a step that is skipped did not skip it."""
    none, both = (False, False), (True, True)
    windows = [
        window(0, has_rare=both),
        window(9, fault="NaN row", has_rare=none),
        window(1, has_rare=none),
        window(2, has_rare=both),
    ]
    windows += [window(8, fault="NaN row", has_rare=both), window(3, has_rare=both)]
    after, state, _, _ = train(tmp_path, windows)
    clean, clean_state, _, _ = train(tmp_path, [windows[index] for index in (0, 2, 3, 5)], guard=False)
    assert differing(after[6], clean[4]) == []
    assert [int(entry["step"]) for entry in state["state"].values()] == [4, 4, 4, 4, 3, 3]
    assert same_states(state, clean_state)


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS)[:2])
def test_without_a_bad_step_the_bits_are_those_without_a_guard(tmp_path, clean_run, optimizer):
    after, state, told, guard = train(
        tmp_path, [window(number) for number in range(4)], optimizer=optimizer, clipping="norm"
    )
    clean, clean_state, _, _ = clean_run(optimizer, "norm")
    assert differing(after[4], clean[4]) == []
    assert same_states(state, clean_state)
    assert (told, guard.num_skipped) == ([], 0)


def test_without_the_guard_a_bad_step_spoils_the_model(tmp_path):
    after, *_ = train(tmp_path, [window(0), window(9, fault="NaN row")], guard=False)
    assert all(value.isnan().any() for name, value in after[2].items() if "rare" not in name and "first" in name)


def test_a_clean_state_is_saved_in_the_middle_of_a_run(tmp_path):
    states = []

    class Saves(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            if trainer.global_step == 2 and not states:
                states.append(trainer.optimizers[0].state_dict()["state"][0]["step"].clone())

    windows = [window(0), window(9, fault="NaN row"), window(1), window(2)]
    after, state, _, _ = train(tmp_path, windows, callbacks=[Saves()])
    clean, clean_state, _, _ = train(tmp_path, [windows[0], *windows[2:]], guard=False)
    assert [int(step) for step in states] == [1]
    assert differing(after[4], clean[3]) == []
    assert same_states(state, clean_state)


class CountsWaits(Callback):
    """What makes the host wait from the first batch to the last step's end."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 0:
            self.context = count_host_waits()
            self.waits = self.context.__enter__()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == trainer.max_steps:
            self.context.__exit__(None, None, None)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_guard_adds_no_wait_and_waiting_is_one_per_step(tmp_path, optimizer):
    counts = []
    for guard in (False, FiniteGuard(check_every_n_steps=100, unsupported="wait")):
        waits = CountsWaits()
        train(
            tmp_path,
            [window(number, num_parts=1) for number in range(3)],
            optimizer=optimizer,
            clipping="norm",
            guard=guard,
            callbacks=[waits],
        )
        counts.append(waits.waits.total)
    assert counts[1] - counts[0] == (0 if optimizer in ("FusedAdamW", "torch, fused") else 3)


def test_gradients_are_read_once_where_the_step_clips(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "lightning_fastft.training.optimizer.grad_norm", lambda table: calls.append(1) or grad_norm(table)
    )
    for clipping, expected in (("norm", 3), ("none", 3), ("value", 6)):
        calls.clear()
        train(tmp_path, [window(number) for number in range(3)], clipping=clipping)
        assert len(calls) == expected, clipping


def bad_run(fault_steps, num_steps):
    return [
        window(number, fault="NaN loss" if number in fault_steps else None, num_parts=1) for number in range(num_steps)
    ]


def test_the_run_stops_when_max_skips_of_the_last_steps_were_skipped(tmp_path):
    guard = FiniteGuard(max_skips=3, check_every_n_steps=2)
    with pytest.raises(
        NotTrainingError,
        match=r"3 of the last 8 optimizer steps were skipped \(max_skips=3\).*step 8 .*rank 0: batch 7",
    ) as caught:
        train(tmp_path, bad_run({1, 4, 7}, 40), guard=guard)
    assert "learning rate" in str(caught.value)
    assert guard.num_skipped == 3
    # The optimizer is let go, whatever happened.
    assert guard._trainer is None


def test_the_last_steps_of_a_run_are_judged(tmp_path):
    with pytest.raises(NotTrainingError, match="1 of the last 3"):
        train(tmp_path, bad_run({2}, 3), guard=FiniteGuard(max_skips=1, check_every_n_steps=100))


def test_skips_that_lie_far_apart_do_not_stop_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_fastft.callbacks.finite_guard.WINDOW_STEPS", 4)
    _, _, told, guard = train(tmp_path, bad_run({1, 6, 11}, 13), guard=FiniteGuard(max_skips=2, check_every_n_steps=3))
    assert (guard.num_skipped, guard.num_steps, len(told)) == (3, 13, 3)


def test_gradient_health_takes_a_skipped_step_for_none(tmp_path):
    health = GradientHealth(num_steps=3)
    train(tmp_path, bad_run({1}, 6), callbacks=[health])
    assert "moved" in health.status().reason


def test_optimizers_are_let_go(tmp_path):
    for optimizer in OPTIMIZERS:
        module = Net(optimizer)
        trainer = quiet_trainer(tmp_path, max_steps=1, callbacks=[FiniteGuard(unsupported="wait")])
        trainer.fit(module, DataLoader(window(0), batch_size=None))
        assert getattr(trainer.optimizers[0], "found_inf", None) is None
        assert getattr(trainer.optimizers[0], "_judge", None) is None


class Statuses(Callback):
    def __init__(self, guard):
        self.guard, self.found = guard, []

    def on_train_batch_end(self, *args):
        self.found.append(self.guard.status())


@pytest.mark.parametrize(
    ("optimizer", "unsupported", "state", "reason"),
    [
        ("FusedAdamW", "refuse", "active", "FusedAdamW; 0 of 0 steps skipped"),
        ("without a flag", "wait", "active", "read by the host in every step, for SGD"),
        ("without a flag", "refuse", "refused", "SGD takes no found_inf flag"),
        # Its first momentum is memory that a skipped step leaves unwritten.
        ("fused, with momentum", "refuse", "refused", "SGD takes no found_inf flag"),
    ],
)
def test_the_status_says_how_steps_are_guarded(tmp_path, optimizer, unsupported, state, reason):
    guard = FiniteGuard(unsupported=unsupported)
    statuses = Statuses(guard)
    train(tmp_path, [window(0)], optimizer=optimizer, guard=guard, callbacks=[statuses])
    assert statuses.found[0].state == state
    assert reason in statuses.found[0].reason
    assert (statuses.found[0].remedy == "") == (state == "active")
    assert ("unsupported='wait'" in statuses.found[0].remedy) == (state == "refused")


def test_manual_optimization_is_refused(tmp_path):
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            self.optimizers().step()

    Manual.automatic_optimization = property(lambda self: False, lambda self, value: None)
    guard = FiniteGuard()
    trainer = quiet_trainer(tmp_path, max_steps=1, callbacks=[guard])
    with pytest.warns(UserWarning, match="guards nothing in this run: manual optimization"):
        trainer.fit(Manual("FusedAdamW"), DataLoader(window(0), batch_size=None))
    assert guard.status().state == "refused"
    assert "manual optimization" in guard.status().reason


def test_a_run_with_a_loss_scaler_is_left_to_it(tmp_path):
    class Scaled(Callback):
        """What precision="16-mixed" has on a CUDA device."""

        def on_fit_start(self, trainer, pl_module):
            trainer.strategy.precision_plugin.scaler = torch.amp.GradScaler("cpu")

    guard = FiniteGuard()
    train(tmp_path, [window(0)], guard=guard, callbacks=[Scaled()])
    assert guard.status().state == "inactive"
    assert "loss scaler" in guard.status().reason


@pytest.mark.parametrize("mode", ["lora_bf16", "full"])
def test_a_tuner_with_its_narrow_copies_is_left_as_it_was(tmp_path, mode):
    """The compute copies of adapters, which the step writes itself."""
    found = []

    class Poisons(Callback):
        def on_before_backward(self, trainer, pl_module, loss):
            if trainer.global_step == 1:
                # A real NaN, in the gradient of one weight.
                parameter = next(iter(trainable(pl_module).values()))
                parameter.register_hook(lambda grad: grad / torch.zeros_like(grad))

        def on_train_batch_end(self, trainer, pl_module, *args):
            copies = (
                []
                if pl_module.low_precision_adapters is None
                else [copy.tensor.clone() for copy in pl_module.low_precision_adapters._copies()]
            )
            found.append(({name: value.detach().clone() for name, value in trainable(pl_module).items()}, copies))

    module = tuner(mode)
    data = DataLoader(packed_batches(1) * 2, batch_size=None)
    guard = FiniteGuard()
    trainer = quiet_trainer(
        tmp_path, strategy="fastft", max_steps=2, callbacks=[guard, Poisons()], gradient_clip_val=0.01
    )
    with pytest.warns(
        UserWarning, match=r"step 2 was skipped: gradients not finite.*batch 1 of its epoch \(3 documents\)"
    ):
        trainer.fit(module, data)
    (weights, copies), (weights_after, copies_after) = found
    assert guard.num_skipped == 1
    assert differing(weights, weights_after) == []
    assert (len(copies) > 0) == (mode == "lora_bf16")
    assert all(torch.equal(one, other) for one, other in zip(copies, copies_after))


def test_the_pack_is_named_by_its_examples(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"input_ids": [1 + number, 2, 3, 4]}) + "\n" for number in range(6)))
    data = quiet_data(str(path), max_tokens=8)
    trained = []

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def training_step(self, batch, batch_idx):
            trained.append(sorted(set(batch["input_ids"][0].tolist()) - {2, 3, 4}))
            return self.weight.sum() * (float("nan") if batch_idx == 1 else 1.0)

        def configure_optimizers(self):
            return FusedAdamW(self.parameters())

    trainer = quiet_trainer(tmp_path, max_steps=3, callbacks=[FiniteGuard(max_skips=1)])
    with pytest.raises(NotTrainingError) as caught:
        trainer.fit(Model(), datamodule=data)
    _, numbers = data.find_examples(1)
    assert f"micro-batch 1 of the plan with examples {', '.join(map(str, numbers))} of {str(path)!r}" in str(
        caught.value
    )
    # Their first ids are those that were trained.
    assert {1 + number for number in numbers} - {2, 3, 4} == set(trained[1])


# Two ranks: FINITE_GUARD_CASES run one after the other in the same two processes.

RANK_CASES = [
    (strategy, fault, bad_ranks, position)
    for strategy, optimizer in (("ddp", "FusedAdamW"), ("fsdp", "torch, fused"))
    for fault, bad_ranks, position in (
        ("NaN row", (1,), 0),
        ("infinite loss", (1,), 1),
        ("NaN in one gradient", (0,), 1),
        ("bf16 overflow", (0, 1), 0),
    )
]


class Sharded(Net):
    """The same under FSDP2, each layer in pieces."""

    def configure_model(self):
        for layer in (self.first, self.last, self.rare):
            if not isinstance(layer, FSDPModule):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def fault(self, name, hidden):
        # A weight in pieces cannot be used outside of its layer; what comes back through the layer's output is one bad
        # gradient too.
        return (hidden[0, 0] * 0.0).sqrt() if name == "NaN in one gradient" else super().fault(name, hidden)


def local(bits):
    return {name: getattr(value, "to_local", lambda value=value: value)().clone() for name, value in bits.items()}


def rank_run(folder, strategy, windows):
    register_strategies()
    module = (Sharded if strategy == "fsdp" else Net)("torch, fused" if strategy == "fsdp" else "FusedAdamW")
    guard, recorder = FiniteGuard(check_every_n_steps=2), Recorder()
    trainer = quiet_trainer(
        folder,
        strategy="ddp" if strategy == "ddp" else "fastft_fsdp",
        devices=NUM_RANKS,
        max_steps=len(windows),
        accumulate_grad_batches=NUM_PARTS,
        callbacks=[guard, recorder],
        use_distributed_sampler=False,
        gradient_clip_val=0.05,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader([batch for batches in windows for batch in batches], batch_size=None))
    told = [str(warning.message) for warning in caught if "FiniteGuard" in str(warning.message)]
    return [local(bits) for bits in recorder.after], guard.num_skipped, told


def rank_main(path):
    rank = int(os.environ["RANK"])
    found = {}
    for case in RANK_CASES:
        strategy, fault, bad_ranks, position = case
        good = [window(10 * number + rank) for number in range(3)]
        bad = window(90 + rank, fault=fault if rank in bad_ranks else None, position=position)
        after, num_skipped, told = rank_run(Path(path).parent, strategy, [*good[:2], bad, good[2]])
        clean, _, _ = rank_run(Path(path).parent, strategy, good)
        found[case] = {
            "changed": differing(after[2], after[3]),
            "differs": differing(after[4], clean[3]),
            "moved": len(differing(after[3], after[4])),
            "skipped": num_skipped,
            "told": told,
        }
    try:
        rank_stop(Path(path).parent, rank)
    except NotTrainingError as error:
        found["stop"] = str(error)
    torch.save(found, f"{path}.{rank}")


def rank_stop(folder, rank):
    windows = [
        window(number + 50 * rank, fault="NaN loss" if rank == 1 and number in (2, 3) else None, num_parts=1)
        for number in range(12)
    ]
    trainer = quiet_trainer(
        folder,
        strategy="ddp",
        devices=NUM_RANKS,
        max_steps=12,
        callbacks=[FiniteGuard(max_skips=2, check_every_n_steps=2)],
        use_distributed_sampler=False,
    )
    trainer.fit(Net("FusedAdamW"), DataLoader([batch for batches in windows for batch in batches], batch_size=None))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "found"
    run_two_ranks("tests.callbacks.test_finite_guard", path)
    return [torch.load(f"{path}.{rank}", weights_only=True) for rank in range(NUM_RANKS)]


@pytest.mark.fault
@pytest.mark.parametrize("case", RANK_CASES, ids=str)
def test_a_bad_step_of_one_rank_changes_nothing_on_any(two_ranks, case):
    for rank, found in enumerate(two_ranks):
        assert found[case]["changed"] == [], rank
        assert found[case]["differs"] == [], rank
        assert found[case]["moved"] > 0
        assert found[case]["skipped"] == 1
    _, fault, bad_ranks, _ = case
    (told,) = two_ranks[0][case]["told"]
    if fault not in FINITE_LOSS:
        assert [rank for rank in range(NUM_RANKS) if f"rank {rank}: batch 4" in told] == list(bad_ranks)


@pytest.mark.fault
def test_every_rank_stops_at_the_same_step_and_names_the_pack_of_the_bad_one(two_ranks):
    assert two_ranks[0]["stop"] == two_ranks[1]["stop"]
    assert (
        "step 4 was skipped: loss not finite (NaN or infinity). Its data: rank 1: batch 3 of its epoch."
        in two_ranks[0]["stop"]
    )


class HugeGradient(Callback):
    """One finite gradient in the second step whose square is not."""

    def __init__(self, value):
        self.value = value

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == 1:
            next(param for param in pl_module.parameters() if param.grad is not None).grad.view(-1)[0] = self.value

    def on_train_end(self, trainer, pl_module):
        state = [
            value
            for held in trainer.optimizers[0].state.values()
            for value in held.values()
            if isinstance(value, torch.Tensor)
        ]
        # SGD has no state; the optimizers of the test that reads this have some.
        self.num_held = len(state)
        self.is_finite = all(bool(value.isfinite().all()) for value in state)


@pytest.mark.covering
@pytest.mark.parametrize("value", [3e38, -1e25, 1e20])
@pytest.mark.parametrize(
    "make",
    [lambda ps: FusedAdamW(ps, lr=1e-3), lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True)],
    ids=["ours", "torch"],
)
def test_a_finite_gradient_whose_square_is_not_changes_nothing(tmp_path, make, value):
    class Module(PlainModule):
        def configure_optimizers(self):
            return make(list(self.parameters()))

    huge, guard = HugeGradient(value), FiniteGuard()
    with pytest.warns(UserWarning, match="skipped"):
        quiet_trainer(tmp_path, strategy="fastft", callbacks=[huge, guard], max_steps=4).fit(
            Module(tiny_llama()), packed_loader(4)
        )
    assert huge.num_held > 0
    assert huge.is_finite
    assert guard.num_skipped == 1


def adamw_8bit(params):
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(params, lr=1e-3, min_8bit_size=16)


@pytest.mark.parametrize(
    ("make", "dtype", "value", "clipping"),
    [
        (lambda ps: FusedAdamW(ps, lr=1e-3, optim_bits=8), torch.float32, 3e38, {}),
        (lambda ps: FusedAdamW(ps, lr=1e-3, master_weights=True), torch.bfloat16, 3e38, {}),
        (lambda ps: FusedAdamW(ps, lr=1e-3), torch.float32, 3e38, CLIPPING["norm"]),
        (lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True), torch.float32, 3e38, CLIPPING["norm"]),
        (lambda ps: torch.optim.AdamW(ps, lr=1e-3, eps=1e-4, fused=True), torch.float16, 3e4, {}),
        (lambda ps: torch.optim.AdamW(ps, lr=1e-3, eps=1e-4), torch.float16, -3e2, {}),
        (adamw_8bit, torch.float32, 3e38, {}),
        (adamw_8bit, torch.bfloat16, 3e38, CLIPPING["norm"]),
    ],
    ids=[
        "8 bits", "masters of bf16", "clipped by norm", "torch, clipped by norm", "pure fp16", "pure fp16, waiting",
        "bitsandbytes", "bitsandbytes, bf16, clipped by norm",
    ],
)  # fmt: skip
def test_a_finite_gradient_whose_square_is_not_leaves_every_kind_of_state_finite(
    tmp_path, make, dtype, value, clipping
):
    class Module(PlainModule):
        def configure_optimizers(self):
            return make(list(self.parameters()))

        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            if isinstance(optimizer, FusedAdamW):
                if gradient_clip_val:
                    optimizer.clip_next(gradient_clip_val)
            else:
                super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)

    huge, guard = HugeGradient(value), FiniteGuard(unsupported="wait")
    with pytest.warns(UserWarning, match="skipped"):
        quiet_trainer(tmp_path, strategy="fastft", callbacks=[huge, guard], max_steps=4, **clipping).fit(
            Module(tiny_llama().to(dtype)), packed_loader(4)
        )
    assert huge.num_held > 0
    assert huge.is_finite
    assert guard.num_skipped == 1


def test_waiting_beside_clipping_by_value_is_refused(tmp_path):
    class Module(PlainModule):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    guard = FiniteGuard(unsupported="wait")
    clipping = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}
    trainer = quiet_trainer(
        tmp_path, strategy="fastft", callbacks=[HugeGradient(float("inf")), guard], max_steps=3, **clipping
    )
    with pytest.warns(UserWarning, match="guards nothing in this run"):
        trainer.fit(Module(tiny_llama()), packed_loader(3))
    assert trainer.global_step == 3
    assert guard.status().state == "refused"


if __name__ == "__main__":
    rank_main(sys.argv[1])
    leave()
