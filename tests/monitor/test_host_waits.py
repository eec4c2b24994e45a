"""HostWaitDetector: each wait once, with the line of the user's code, in any LightningModule; nothing outside the
watched steps.
"""

import inspect
import re
import warnings

import lightning.pytorch as pl
import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from lightning_fastft import HostWaitDetector
from lightning_fastft.hf.dtypes import check_precision
from lightning_fastft.monitor.host_waits import HostWaitError, render_waits
from lightning_fastft.monitor.report.sync_calls import judge_copy
from lightning_fastft.monitor.report.waits import KNOWN, WaitRecorder, is_library
from tests.support.training_parts import quiet_trainer

READS = (
    "item",
    "float",
    "bool",
    "mask",
    "assign",
    "nonzero",
    "tolist",
    "numpy",
    "cpu",
    "unique",
    "repeat",
    "equal",
    "library",
)


def wait_once(kind, x):  # noqa: C901 - a list of cases
    """One wait of each kind, each on a line of its own that ends in the name of its kind."""
    mask = x.detach() > 0
    match kind:
        case "item":
            x.sum().item()  # item
        case "float":
            float(x.sum())  # float
        case "bool":
            assert x.sum() != 0.5  # bool
        case "mask":
            x[mask]  # mask
        case "assign":
            # A number on the host is filled in under the mask since torch 2.15, without a wait.
            x.detach().clone()[mask] = x.detach().sum()  # assign
        case "nonzero":
            mask.nonzero()  # nonzero
        case "tolist":
            x.detach().tolist()  # tolist
        case "numpy":
            x.detach().numpy()  # numpy
        case "cpu":
            x.detach().cpu()  # cpu
        case "unique":
            x.detach().unique()  # unique
        case "repeat":
            torch.repeat_interleave(x.detach(), mask.long())  # repeat
        case "equal":
            torch.equal(x, x)  # equal
        case "library":
            weight = torch.nn.Parameter(torch.ones(2))
            weight.grad = torch.ones(2)
            torch.nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)  # library


class Linear(pl.LightningModule):
    """Anybody's module: nothing of the package."""

    def __init__(self, kinds=(), *, in_backward=False):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.kinds, self.in_backward = kinds, in_backward
        self.modes = []

    def training_step(self, batch, batch_idx):
        self.modes.append(_get_current_dispatch_mode())
        y = self.linear(batch)
        for kind in self.kinds:
            wait_once(kind, y[0])
        if self.in_backward:
            y.register_hook(lambda gradient: gradient * gradient.sum().item())  # backward
        return y.square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(tmp_path, module, *callbacks, max_steps=4, **options):
    trainer = quiet_trainer(tmp_path, max_steps=max_steps, callbacks=[*callbacks], **options)
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=2))
    return trainer


def line_of(kind):
    lines, first = inspect.getsourcelines(wait_once)
    return next(first + number for number, line in enumerate(lines) if f"# {kind}" in line)


@pytest.mark.parametrize("kind", READS)
def test_names_each_kind_of_wait_by_the_line_of_the_user(tmp_path, kind):
    detector = HostWaitDetector(steps=[1, 2])
    fit(tmp_path, Linear([kind]), detector)
    here = [(wait, count) for wait, count in detector.waits.items() if wait.place.line == line_of(kind)]
    assert detector.num_watched == 2
    assert [count for _, count in here] == [2] * len(here) != []
    assert {wait.place.file for wait, _ in here} == {__file__}
    assert {wait.place.function for wait, _ in here} == {"wait_once"}
    assert all(f"# {kind}" in wait.place.text and len(wait.remedy) > 20 for wait, _ in here)
    assert len(detector.waits) == len(here), detector.waits
    is_of_library = kind in ("unique", "library")
    assert all((wait.library is not None and is_library(wait.library.file)) == is_of_library for wait, _ in here)


def test_step_without_a_wait_has_none(tmp_path):
    detector = HostWaitDetector(steps=[1, 2])
    # Clipping, AdamW's step counters and logging without a bar are Lightning's and torch's own, and wait for nothing on
    # a GPU.
    fit(tmp_path, Linear(), detector, gradient_clip_val=1.0)
    assert (dict(detector.waits), detector.num_watched) == ({}, 2)
    assert render_waits(detector.waits, num_steps=2) == "Host syncs: none in 2 watched steps."


def test_wait_in_the_backward_is_named(tmp_path):
    detector = HostWaitDetector(steps=[1])
    fit(tmp_path, Linear(in_backward=True), detector)
    (wait,) = detector.waits
    assert "# backward" in wait.place.text


def test_wait_of_the_backward_itself_is_named_by_its_operation(tmp_path):
    class Masks(Linear):
        def training_step(self, batch, batch_idx):
            y = self.linear(batch)
            return y[y.detach() > -9].square().mean()

    detector = HostWaitDetector(steps=[1])
    fit(tmp_path, Masks(), detector)
    assert sorted((wait.place.file, wait.place.function) for wait in detector.waits) == [
        (__file__, "training_step"),
        ("<backward>", "IndexBackward0"),
    ]


def test_batches_in_the_making_read_the_host_and_count_for_nothing(tmp_path):
    detector = HostWaitDetector(steps=[0, 1, 2])
    trainer = quiet_trainer(tmp_path, max_steps=3, callbacks=[detector])
    loader = torch.utils.data.DataLoader(
        torch.randn(8, 4), batch_size=2, collate_fn=lambda rows: torch.stack(rows)[torch.ones(2) > 0]
    )
    trainer.fit(Linear(), loader)
    assert (dict(detector.waits), detector.num_watched) == ({}, 3)


def test_logging_with_a_progress_bar_value_is_named_as_such(tmp_path):
    class Logs(Linear):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, prog_bar=True)
            return loss

    detector = HostWaitDetector(steps=[1])
    trainer = pl.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        devices=1,
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[detector],
    )
    trainer.fit(Logs(), torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=2))
    assert any("prog_bar" in wait.remedy for wait in detector.waits), detector.waits


class LogsLength(pl.Callback):
    """Logs a figure of each batch, of which the host knows the shape."""

    def __init__(self, make):
        self.make = make

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.log("length", self.make(batch.shape[1]))


@pytest.mark.parametrize("make", [int, float])
def test_number_that_is_logged_is_copied_to_the_device(tmp_path, make):
    detector = HostWaitDetector(steps=[1, 2])
    fit(tmp_path, Linear(), LogsLength(make), detector)
    ((wait, count),) = detector.waits.items()
    assert count == 2
    assert wait.place.function == "on_train_batch_end"
    assert wait.call == "copy to the device"
    assert "self.log a tensor" in wait.remedy


def test_tensor_on_the_host_that_is_logged_waits_for_nothing(tmp_path):
    detector = HostWaitDetector(steps=[1, 2])
    fit(tmp_path, Linear(), LogsLength(lambda length: torch.tensor(float(length))), detector)
    assert not detector.waits


def test_watches_all_micro_batches_of_the_steps_asked_for_and_nothing_else(tmp_path):
    module, detector = Linear(["item"]), HostWaitDetector(steps=[1])
    before = {name: getattr(torch.Tensor, name) for name in ("tolist", "numpy", "cpu")}
    fit(tmp_path, module, detector, max_steps=3, accumulate_grad_batches=2)
    assert [mode is not None for mode in module.modes] == [False, False, True, True, False, False]
    assert detector.num_watched == 1
    assert sum(detector.waits.values()) == 2
    assert {name: getattr(torch.Tensor, name) for name in before} == before
    assert not {"tolist", "numpy", "cpu"} & set(vars(torch.Tensor)) - set(before)


@pytest.mark.parametrize("on_wait", ["report", "warn"])
def test_prints_a_table_once(tmp_path, on_wait, caplog):
    detector = HostWaitDetector(steps=[1, 2], on_wait=on_wait)
    with warnings.catch_warnings(record=True) as caught, caplog.at_level("INFO", logger="lightning.pytorch"):
        warnings.simplefilter("always")
        fit(tmp_path, Linear(["item", "mask"]), detector)
    shown = (
        [str(found.message) for found in caught]
        if on_wait == "warn"
        else [record.getMessage() for record in caplog.records]
    )
    (text,) = [text for text in shown if "Host syncs:" in text]
    assert text.startswith("Host syncs: 2 a step, over 2 watched steps.")
    assert f"{__file__}:{line_of('mask')} in wait_once: x[mask]  # mask" in text
    assert text.count("->") == 2
    assert detector.status().reason == "2 a step, 2 places, over 2 watched steps"


def test_a_fine_tuner_takes_the_remedy_for_the_gradient_scaler():
    remedies = {remedy for _, remedy in KNOWN if "scaler" in remedy}
    assert remedies
    for remedy in remedies:
        precision = re.search("precision='([^']+)'", remedy)[1]
        check_precision(precision, dtype="bfloat16", adapter_dtype=torch.float32, has_adapters=True, is_fit=True)


def test_status_counts_one_place_and_one_step_in_the_singular(tmp_path):
    detector = HostWaitDetector(steps=[1])
    assert detector.status().reason == "step 1 is still to come"
    fit(tmp_path, Linear(["item"]), detector)
    assert detector.status().reason == "1 a step, 1 place, over 1 watched step"


def test_raise_ends_the_run_in_the_call_that_waits_and_puts_everything_back(tmp_path):
    module, detector = Linear(["item"]), HostWaitDetector(steps=[1], on_wait="raise")
    with pytest.raises(HostWaitError, match=rf"test_host_waits.py:{line_of('item')} in wait_once: x.sum") as caught:
        fit(tmp_path, module, detector)
    assert "wait_once" in [entry.name for entry in caught.traceback]
    assert _get_current_dispatch_mode() is None
    assert len(module.modes) == 2


def test_exception_in_a_watched_step_puts_everything_back(tmp_path):
    class Fails(Linear):
        def training_step(self, batch, batch_idx):
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fit(tmp_path, Fails(), HostWaitDetector(steps=[0]))
    assert _get_current_dispatch_mode() is None


def test_run_that_ends_before_a_watched_step_says_so(tmp_path):
    with pytest.warns(UserWarning, match="watched nothing: the run had 2 optimizer steps"):
        fit(tmp_path, Linear(), HostWaitDetector(steps=[7]), max_steps=2)


def test_reads_of_shape_only_tensors_are_no_waits():
    with WaitRecorder(torch.device("cpu")).watch() as recorder:
        torch.ones(2, device="meta")[torch.ones(2, dtype=torch.bool, device="meta")] = 0.0
    assert not recorder.count


def test_rule_for_copies_knows_direction_blocking_and_pinned_memory(monkeypatch):
    host, device = torch.ones(2), torch.ones(2)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: self is pinned, raising=False)
    pinned = torch.ones(2)
    places = {id(device): torch.device("cuda", 0)}

    class Seen(torch.Tensor):
        device = property(lambda self: places.get(id(self), torch.device("cpu")))

    host, device, pinned = (tensor.as_subclass(Seen) for tensor in (host, device, pinned))
    places[id(device)] = torch.device("cuda", 0)
    # (name, arguments, keywords, what waits)
    cases = [
        ("_to_copy", (device,), {"device": "cpu"}, "copy to the host"),
        ("_to_copy", (device,), {"device": "cpu", "non_blocking": True}, None),
        ("_to_copy", (device,), {"dtype": torch.float64}, None),
        ("_to_copy", (host,), {"device": "cuda"}, "copy to the device"),
        ("_to_copy", (host,), {"device": "cuda", "non_blocking": True}, None),
        ("copy_", (host, device), {}, "copy to the host"),
        ("copy_", (host, device, True), {}, "copy to the host (pageable memory)"),
        ("copy_", (pinned, device, True), {}, None),
        ("copy_", (pinned, device), {}, "copy to the host"),
        ("copy_", (device, host), {}, "copy to the device"),
        ("copy_", (device, pinned, True), {}, None),
        ("copy_", (device, device), {}, None),
        ("copy_", (host, pinned), {}, None),
    ]
    for name, args, kwargs, expected in cases:
        found = judge_copy(name, args, kwargs)
        assert (found and found[0]) == expected, (name, kwargs, expected)


def test_on_cuda_host_tensors_are_no_waits_and_warnings_of_the_driver_are(monkeypatch):
    """With the debug mode played by a stand-in: what it would warn of is warned of here."""
    modes = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: None)
    before = torch.cuda.synchronize
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with WaitRecorder(torch.device("cuda", 0)).watch() as recorder:
            assert modes[-1] == "warn"
            torch.ones(2).sum().item()
            torch.ones(2)[torch.ones(2) > 0].tolist()
            for _ in range(2):
                warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)  # driver
            torch.cuda.synchronize()  # explicit
            warnings.warn("something else", stacklevel=1)
    assert [(wait.place.text.rsplit("# ", 1)[1], count) for wait, count in recorder.count.items()] == [
        ("driver", 2),
        ("explicit", 1),
    ]
    assert [str(found.message) for found in caught] == ["something else"]
    assert (modes[-1], torch.cuda.synchronize) == (0, before)


@pytest.mark.gpu
def test_gpu_waits_are_counted_once_each_and_the_mode_is_restored(tmp_path):
    class OnGpu(Linear):
        def training_step(self, batch, batch_idx):
            y = self.linear(batch)
            y.sum().item()  # read
            y[y.detach() > 0].sum()  # mask
            y.detach().cpu()  # cpu
            y.detach().to("cpu", non_blocking=True)  # pinned: no wait
            torch.empty(y.shape).copy_(y.detach(), non_blocking=True)  # pageable
            torch.tensor([1.0], device=y.device)  # made
            torch.cuda.synchronize()  # synchronize
            torch.ones(2).sum().item()
            return y.square().mean()

    detector = HostWaitDetector(steps=[1])
    trainer = quiet_trainer(tmp_path, accelerator="gpu", max_steps=3, callbacks=[detector])
    trainer.fit(OnGpu(), torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=2))
    found = {
        wait.place.text.rsplit("# ", 1)[1]: count for wait, count in detector.waits.items() if "# " in wait.place.text
    }
    # The mask waits in the forward; its backward runs in a thread of its own, without a line of the user's.
    assert found == {"read": 1, "mask": 1, "cpu": 1, "pageable": 1, "made": 1, "synchronize": 1}
    assert torch.cuda.get_sync_debug_mode() == 0
    assert torch.cuda.synchronize.__module__ == "torch.cuda"


@pytest.mark.gpu
def test_gpu_step_without_a_wait_has_none(tmp_path):
    detector = HostWaitDetector(steps=[1, 2])
    trainer = quiet_trainer(tmp_path, accelerator="gpu", max_steps=4, callbacks=[detector])
    trainer.fit(Linear(), torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=2))
    assert (dict(detector.waits), detector.num_watched) == ({}, 2)
