"""R16: an allocation that fails leaves a usable state: one error that says what to do, nothing half updated,
checkpoints whole.

Every failure is a real one: memory that no machine has, a limit on the address space of a child, or a cap on a GPU's
allocator.
"""

import json
import os
import resource

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.checkpoint.files import check_file
from lightning_fastft.core.errors import FastFTError
from lightning_fastft.core.memory_error import DeviceMemoryError
from lightning_fastft.strategies.memory_errors import StepWitness, is_out_of_memory
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.optimizer import FusedAdamW
from tests.faults.saves import fork
from tests.support.training_parts import PlainModule, packed_batches, packed_loader, quiet_trainer, tiny_llama

# More bytes than an address has bits for.
TOO_MANY = 2**55
NUM_STEPS, FAILS_AT = 6, 4


def run_out():
    return torch.empty(TOO_MANY, dtype=torch.uint8)


def snapshot(trainer):
    """Weights, optimizer state and counters, copied to the host: a module may be there when a fit has ended."""
    optimizer = trainer.optimizers[0]
    weights = [parameter.detach().to("cpu", copy=True) for parameter in trainer.lightning_module.parameters()]
    state = [value.to("cpu", copy=True) for values in optimizer.state.values() for value in values.values()]
    return {"weights": weights, "state": state, "step": trainer.global_step}


def is_equal(one, other):
    same = [
        len(one[name]) == len(other[name]) and all(map(torch.equal, one[name], other[name]))
        for name in ("weights", "state")
    ]
    return all(same) and one["step"] == other["step"]


class Before(Callback):
    """What the run was behind its last whole step."""

    def __init__(self):
        self.found = {}

    def on_train_batch_end(self, trainer, *args):
        self.found = snapshot(trainer)


class RunsOut(PlainModule):
    """Asks for too much once or more, in the step after ``fails_at`` steps, in its last micro-batch."""

    fails_at = FAILS_AT
    num_failures = 1

    def __init__(self, model, *, where):
        super().__init__(model)
        self.where, self.num_failed, self.num_forwards = where, 0, 0
        self.had_gradients = False
        # Behind the last layer's backward.
        model.model.layers[-1].register_forward_pre_hook(self.watch)

    def watch(self, layer, args):
        def fail(grad):
            self.had_gradients |= any(torch.any(item.grad != 0) for item in layer.parameters() if item.grad is not None)
            self.fail("middle")

        if args[0].requires_grad:
            args[0].register_hook(fail)

    def fail(self, where):
        is_last = (self.trainer.fit_loop.batch_idx + 1) % self.trainer.accumulate_grad_batches == 0
        if is_last and where == self.where and self.trainer.global_step == self.fails_at:
            if self.num_failed == self.num_failures:
                return
            self.num_failed += 1
            run_out()

    def training_step(self, batch, batch_idx):
        self.num_forwards += 1
        loss = super().training_step(batch, batch_idx)
        self.fail("forward")
        loss.register_hook(lambda grad: self.fail("backward"))
        return loss

    def state_dict(self, *args, **kwargs):
        if self._trainer is not None:
            self.fail("save")
        return super().state_dict(*args, **kwargs)

    def configure_optimizers(self):
        return FusedAdamW(self.parameters(), lr=1e-2)


class RunsOutLater(RunsOut):
    """In a step that has a plan with two micro-batches per step too."""

    fails_at = FAILS_AT + 1


class KeepsGradients(RunsOut):
    """Zeroes gradients by a rule of its own."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad()


def fit(folder, *, where, activations=None, ckpt_path=None, num_done=0, kind=RunsOut, **options):
    torch.manual_seed(3)
    module, before = kind(tiny_llama(), where=where), Before()
    saved = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = quiet_trainer(
        folder,
        strategy=FastFTStrategy(activations=activations),
        max_steps=NUM_STEPS,
        callbacks=[before, saved],
        enable_checkpointing=True,
        **options,
    )
    error = None
    try:
        # A plain loader begins anew in a resumed run.
        batches = packed_batches(8)
        trainer.fit(module, DataLoader(batches[num_done:] + batches[:num_done], batch_size=None), ckpt_path=ckpt_path)
    except DeviceMemoryError as found:
        error = found
    return module, trainer, before, error


@pytest.mark.parametrize("where", ["forward", "backward", "save"])
def test_failed_allocation_ends_in_one_error_with_nothing_half_updated(tmp_path, where):
    whole, *_ = fit(tmp_path / "whole", where="nowhere")
    module, trainer, before, error = fit(tmp_path / "hurt", where=where)
    assert module.num_failed == 1
    assert isinstance(error, FastFTError)
    assert isinstance(error, torch.OutOfMemoryError)
    message = str(error)
    assert message.startswith(f"The {where} ran out of memory on cpu, at optimizer step {FAILS_AT + 1}. ")
    for part in (
        "Activations: auto:",
        "Budget: vram_budget auto",
        "peak of this process so far",
        "start again with",
        "tried to allocate",
    ):
        assert part in message
    # The save comes in the hook that copies; weights are the same.
    assert all(map(torch.equal, before.found["weights"], list(module.parameters())))
    assert is_equal(before.found, snapshot(trainer))
    paths = sorted((tmp_path / "hurt").glob("*"))
    assert [path.name for path in paths] == ["step=2.ckpt"] + ["step=4.ckpt"] * (where != "save")
    assert check_file(paths[-1])
    resumed, *_ = fit(tmp_path / "resumed", where="nowhere", ckpt_path=paths[-1], num_done=2 * len(paths))
    print(f"R16: {where}: {message}")
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))


PLANNED = {"vram_budget": 1000.0, "host_budget": 1.0}


class RunsOutThrice(RunsOut):
    num_failures = 3


class RunsOutTooOften(RunsOut):
    num_failures = 4


@pytest.mark.parametrize("kind", [RunsOut, RunsOutThrice])
@pytest.mark.parametrize("where", ["forward", "backward", "middle"])
def test_step_is_repeated_with_the_same_batch_under_leaner_plans(tmp_path, where, kind):
    whole, *_ = fit(tmp_path / "whole", where="nowhere", activations=OffloadCheckpointing("auto", **PLANNED))
    message = f"{'forward' if where == 'forward' else 'backward'} ran out of memory.* repeated .*tried to allocate"
    with pytest.warns(UserWarning, match=message):
        module, trainer, _, error = fit(
            tmp_path / "hurt", where=where, activations=OffloadCheckpointing("auto", **PLANNED), kind=kind
        )
    assert error is None
    assert module.had_gradients
    num_failures = kind.num_failures
    assert module.num_failed == num_failures
    assert (module.num_forwards, trainer.global_step) == (NUM_STEPS + num_failures, NUM_STEPS)
    assert all(map(torch.equal, whole.parameters(), module.parameters()))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_step_is_not_repeated_for_ever(tmp_path, where):
    with pytest.warns(UserWarning, match="repeated"):
        module, *_, error = fit(
            tmp_path, where=where, activations=OffloadCheckpointing("auto", **PLANNED), kind=RunsOutTooOften
        )
    assert error.where == where
    assert module.num_failed == 4


@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 2, "kind": RunsOutLater}, {"kind": KeepsGradients}])
def test_backward_is_not_repeated_where_gradients_of_the_failed_one_would_stay(tmp_path, options):
    _, trainer, before, error = fit(
        tmp_path, where="middle", activations=OffloadCheckpointing("auto", **PLANNED), **options
    )
    assert error.where == "backward"
    assert "predicted" in str(error)
    assert "Gradients may be incomplete" in str(error)
    assert is_equal(before.found, snapshot(trainer))


def _announce(trainer, num_tokens):
    """Let the run know of a longer pack to come."""
    for stack in trainer.strategy.checkpointing.stacks:
        stack.environment = stack.environment._replace(longest_pack=num_tokens)


class AnnouncesTooMuch(Callback):
    """The longest pack to come needs a slab that no host has."""

    def on_train_start(self, trainer, pl_module):
        _announce(trainer, 2**42)


def test_offload_buffer_that_cannot_be_had_is_done_without_and_said(tmp_path):
    reports, trained = [], []
    for policy, callbacks in (("recompute", []), ("offload", [AnnouncesTooMuch()])):
        torch.manual_seed(3)
        module = PlainModule(tiny_llama())
        options = {"host_budget": 2.0**20} if policy == "offload" else {}
        strategy = FastFTStrategy(activations=OffloadCheckpointing(policy, **options))
        trainer = quiet_trainer(tmp_path, strategy=strategy, callbacks=callbacks)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lightning_fastft.strategies.packed_steps.rank_zero_info", reports.append)
            trainer.fit(module, packed_loader())
        trained.append(module)
    assert any(
        "The host has no 524288.0 GiB" in text and "Fewer layer inputs go to the host: 0 instead of 1" in text
        for text in reports
    )
    assert all(map(torch.equal, trained[0].parameters(), trained[1].parameters()))


def address_space():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


class Ballast(PlainModule):
    """Two weights of 64 MiB whose optimizer state, or whose scratch memory, finds no room."""

    NUM_ELEMENTS = 2**24

    def __init__(self, make_optimizer, *, at_step):
        super().__init__(tiny_llama())
        self.one, self.other = (torch.nn.Parameter(torch.ones(self.NUM_ELEMENTS)) for _ in range(2))
        self.make_optimizer, self.at_step = make_optimizer, at_step

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.one.mean() + self.other.mean()

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters())


class LimitInStep(Callback):
    """Leaves room for one more tensor of the weights' size, behind the backward, for the rest of the process or
    the step.
    """

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == pl_module.at_step:
            self.before = snapshot(trainer)
            room = int(1.5 * 4 * pl_module.NUM_ELEMENTS)
            resource.setrlimit(resource.RLIMIT_AS, (address_space() + room, resource.RLIM_INFINITY))


def run_out_in_the_step(write, folder, make_optimizer, *, at_step):
    limit = LimitInStep()
    trainer = quiet_trainer(folder, strategy=FastFTStrategy(), callbacks=[limit])
    found = {}
    try:
        trainer.fit(Ballast(make_optimizer, at_step=at_step), packed_loader())
    except DeviceMemoryError as error:
        found["message"] = str(error)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    found["is_as_before"] = is_equal(limit.before, snapshot(trainer))
    # The state is whole: the same step can be made now.
    trainer.optimizers[0].step()
    os.write(write, json.dumps(found).encode())


OPTIMIZERS = {
    "FusedAdamW": lambda params: FusedAdamW(params, lr=1e-2),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
}


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs the /proc of Linux")
@pytest.mark.parametrize(
    ("name", "at_step", "is_as_before"),
    [("FusedAdamW", 0, True), ("AdamW", 0, True), pytest.param("AdamW", 1, False, marks=pytest.mark.fault)],
)
def test_optimizer_step_that_fails_says_what_it_changed(tmp_path, name, at_step, is_as_before):
    child, read = fork(lambda write: run_out_in_the_step(write, tmp_path, OPTIMIZERS[name], at_step=at_step))
    text = os.read(read, 2**16)
    os.close(read)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    found = json.loads(text)
    print(f"R16: {name}, step {at_step + 1}: {found['message']}")
    assert found["message"].startswith(
        f"The optimizer step ran out of memory on cpu, at optimizer step {at_step + 1}. "
    )
    # What the error says is what happened.
    said = "Weights and optimizer state are as before the step." in found["message"]
    assert said == found["is_as_before"] == is_as_before
    if not is_as_before:
        assert "tensors of weights and state: continue from the last checkpoint" in found["message"]


def test_optimizer_whose_writes_are_unseen_is_not_vouched_for():
    class Foreign(torch.optim.SGD):
        pass

    witness = StepWitness(Foreign([torch.nn.Parameter(torch.ones(1))], lr=0.1))
    assert witness.describe() == "No weight was stepped."
    witness.note()
    assert "cannot be detected" in witness.describe()


@pytest.mark.parametrize("error", [DeviceMemoryError("explained"), RuntimeError("shapes"), ValueError("out of memory")])
def test_other_errors_are_left_alone(error):
    assert not is_out_of_memory(error)


def test_refused_allocation_of_this_torch_is_known():
    with pytest.raises(RuntimeError) as found:
        run_out()
    assert is_out_of_memory(found.value)


POLICIES = [
    ("keep", "OffloadCheckpointing('auto')"),
    ("recompute", "OffloadCheckpointing('offload')"),
    ("offload", "mlp_tiles=8"),
    ("auto", "mlp_tiles=8"),
]


@pytest.mark.parametrize(("policy", "remedy"), POLICIES)
def test_every_policy_has_something_to_set(policy, remedy):
    assert remedy in OffloadCheckpointing(policy).remedy()


class Cap(Callback):
    """Leaves a GPU's allocator half of what the ballast takes more than it has, from one hook of a step on."""

    def __init__(self, where):
        self.where = where
        self.at_step = 0 if where in ("optimizer step", "offload buffer") else FAILS_AT

    def _cap(self, trainer, *names):
        if self.where in names and trainer.global_step == self.at_step:
            self.before = snapshot(trainer)
            torch.cuda.empty_cache()
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(
                (torch.cuda.memory_reserved() + 2 * OnDevice.NUM_ELEMENTS) / total
            )
            trainer.lightning_module.is_capped = True

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._cap(trainer, "forward", "offload buffer")
        if self.where == "offload buffer":
            # Slots on the device for packs of 512 MiB.
            _announce(trainer, 2**22)

    def on_before_backward(self, trainer, pl_module, loss):
        self._cap(trainer, "backward")

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self._cap(trainer, "optimizer step")

    def on_train_batch_end(self, trainer, pl_module, *args):
        # Before the save, which is the last callback's.
        self._cap(trainer, "save")


class OnDevice(PlainModule):
    """A weight of 64 MiB beside a tiny model, with scratch memory of that size in every part of a step but under
    "offload".
    """

    NUM_ELEMENTS = 2**24

    def __init__(self, *, is_small_forward):
        super().__init__(tiny_llama())
        self.ballast = torch.nn.Parameter(torch.ones(self.NUM_ELEMENTS))
        self.is_small_forward, self.is_capped = is_small_forward, False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + (self.ballast.mean() if self.is_small_forward else (self.ballast * 2).square().mean())

    def configure_optimizers(self):
        return FusedAdamW(self.parameters(), lr=1e-3)

    def state_dict(self, *args, **kwargs):
        # As a save does that gathers weights on the device.
        if self.is_capped:
            self.ballast.detach().double()
        return super().state_dict(*args, **kwargs)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("where", ["forward", "backward", "optimizer step", "save", "offload buffer"])
def test_capped_gpu_ends_in_one_error_with_nothing_half_updated(tmp_path, where):
    is_offload = where == "offload buffer"
    cap, saved = Cap(where), ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = quiet_trainer(
        tmp_path,
        accelerator="gpu",
        strategy=FastFTStrategy(activations=OffloadCheckpointing("offload" if is_offload else "recompute")),
        max_steps=NUM_STEPS,
        callbacks=[cap, saved],
        enable_checkpointing=True,
    )
    try:
        with pytest.raises(DeviceMemoryError) as found:
            trainer.fit(OnDevice(is_small_forward=is_offload), packed_loader(8))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    print(f"R16: {where} on a GPU: {found.value}")
    assert str(found.value).startswith(
        f"The {'forward' if is_offload else where} ran out of memory on cuda:0, at optimizer step {cap.at_step + 1}. "
    )
    assert "GiB reserved, of " in str(found.value)
    assert is_equal(cap.before, snapshot(trainer))
    paths = list(tmp_path.glob("*.ckpt"))
    assert len(paths) == {0: 0, FAILS_AT: 2}[cap.at_step] - (where == "save")
    assert all(check_file(path) for path in paths)
