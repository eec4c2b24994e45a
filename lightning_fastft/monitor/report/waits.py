"""Record host syncs: each by its call and line of code, with a fix."""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fastft.monitor.report.sync_calls import (
    NAMES,
    OTHER,
    REMEDIES,
    SYNCHRONIZE,
    UNDISPATCHED,
    judge_call,
)

# Text of the warning of torch.cuda.set_sync_debug_mode.
_SYNC_WARNING = "called a synchronizing CUDA operation"
_PACKAGE = str(Path(__file__).parents[2])
# Callbacks and optimizers of this package read only tensors on the host, as their tests check.
HOST_READERS = (
    *(os.path.join(_PACKAGE, folder, "") for folder in ("callbacks", "monitor")),
    os.path.join(_PACKAGE, "training", "optimizer.py"),
)
# Frames between the call that syncs and the recorder.
_MACHINERY = (
    __file__,
    "torch/_dynamo",
    "torch/utils/_python_dispatch",
    "torch/_compile",
    "torch/_ops.py",
    "/warnings.py",
)
# Lightning calls the step from here; frames further out belong to the script that called fit.
_LOOP = os.path.join("loops", "training_epoch_loop.py")
# Lightning passes logged values to the loggers here.
_CONNECTOR = "logger_connector"
# Lightning copies a number given to self.log to the device of the module here.
_TO_TENSOR = ("__to_tensor", os.path.join("core", "module.py"))
_LOG_REMEDY = (
    "Lightning copies the number to the device: give self.log a tensor on the host, torch.tensor(float(number))"
)
_ENGINE = os.path.join("torch", "autograd", "graph.py")
# Batches are made in a fetcher of Lightning, or in our thread that reads ahead.
_FETCHERS = (os.path.join("loops", "fetchers.py"), os.path.join("packing", "loader.py"))
_SITES = ("site-packages", "dist-packages")
_ROOTS = tuple(
    os.path.join(path, "") for path in (sysconfig.get_path("stdlib"), _PACKAGE, str(Path(torch.__file__).parent))
)

_SCALER = (
    "the gradient scaler asks whether gradients are finite: train in bf16 (FineTuner: precision='32-true' and "
    "dtype='bfloat16'; other modules: precision='bf16-mixed')"
)

# (part of a path on the stack, fix): syncs whose cause the path says better than the operation.
KNOWN = (
    (
        _CONNECTOR,
        "Lightning reads values logged with prog_bar=True, and those of a logging step, from the device: log without "
        "prog_bar, less often",
    ),
    ("amp/grad_scaler.py", _SCALER),
    ("plugins/precision/amp.py", _SCALER),
)


class Place(NamedTuple):
    """A line of code: file, number, function, and its text."""

    file: str
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


class HostWait(NamedTuple):
    """One cause of host syncs.

    Args:
        operation: Name of the operation in the dispatcher.
        call: The operation in words.
        place: Line of the user's code; of a library if no line of the user is on the stack.
        library: Line of the library that syncs; None if it is ``place`` itself.
        remedy: The fix.
        is_logging: Whether Lightning reads values of ``self.log`` for a logger, which it does on logged steps only.
    """

    operation: str
    call: str
    place: Place
    library: Place | None
    remedy: str
    is_logging: bool = False


class WaitRecorder:
    """Record host syncs while it is on.

    On CUDA the dispatcher shows operations that sync, also in the backward, ``torch.cuda.set_sync_debug_mode`` shows
    others, and calls of ``synchronize`` are counted. A sync that none of them shows is missed, such as one of an
    extension that calls the driver itself. On a CPU operations are recorded that would sync if their tensors were on a
    GPU, so reads of tensors that never leave the host count too. Copies to a device are not seen there, except those of
    numbers that ``self.log`` is given.

    Args:
        device: Device of the step.
        on_wait: Called at each sync, inside the call that syncs; an exception of it leaves that call.
        host_only: Prefixes of paths whose code reads only host tensors. They are skipped on a CPU, which cannot tell
            these tensors from others.

    Cost:
        While on, some microseconds per operation, and torch.compile regions run eagerly. While off, nothing.

    Source:
        own; torch.cuda.set_sync_debug_mode of PyTorch.

    Example:
        >>> recorder = WaitRecorder(torch.device("cpu"))
        >>> with recorder.watch():
        ...     number = torch.ones(2).sum().item()
        >>> [wait.operation for wait in recorder.count]
        ['_local_scalar_dense']
    """

    def __init__(
        self,
        device: torch.device,
        *,
        on_wait: Callable[[HostWait], None] | None = None,
        host_only: tuple[str, ...] = (),
    ) -> None:
        self.device = device
        self.on_wait = on_wait
        self.host_only = host_only
        self.count: Counter[HostWait] = Counter()
        self._stack: contextlib.ExitStack | None = None

    @property
    def is_on(self) -> bool:
        """Whether it records."""
        return self._stack is not None

    def start(self) -> None:
        """Start to record; no-op if it is on."""
        if self._stack is not None:
            return
        with contextlib.ExitStack() as stack:
            if self.device.type == "cuda":
                stack.enter_context(_sync_warnings(self.note))
                for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event):
                    stack.enter_context(_watched(owner, "synchronize", lambda name: self.note(name, SYNCHRONIZE)))
            else:
                for name in UNDISPATCHED:
                    stack.enter_context(_watched(torch.Tensor, name, self.note))
            stack.enter_context(_DispatchWatch(self))
            self._stack = stack.pop_all()

    def stop(self) -> None:
        """Stop recording and restore what was replaced; no-op if it is off."""
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()

    @contextlib.contextmanager
    def watch(self) -> Iterator[WaitRecorder]:
        """Record inside a ``with`` block."""
        self.start()
        try:
            yield self
        finally:
            self.stop()

    def note(self, operation: str, remedy: str = "") -> None:
        """Count a sync of the running code.

        Args:
            operation: Name of the operation.
            remedy: The fix; "" looks it up by the operation.
        """
        frames = _frames()
        if self.device.type != "cuda" and frames and _reads_host(frames, host_only=self.host_only):
            return
        known = next((text for part, text in KNOWN for frame in frames if part in frame.f_code.co_filename), "")
        if _makes_logged_tensor(frames):
            known = _LOG_REMEDY
        of_user = next((frame for frame in frames if not is_library(frame.f_code.co_filename)), None)
        # Values of self.log are read later, when no line of the user is on the stack; their names say which they are.
        logging = next((frame for frame in frames if _is_logging(frame)), None)
        inner = _backward_place(frames) or _place(frames[0] if logging is None or of_user is not None else logging)
        wait = HostWait(
            operation=operation,
            call=NAMES.get(operation, operation) if logging is None else _describe_logging(logging),
            place=inner if of_user is None else _place(of_user),
            library=None if of_user is None or of_user is frames[0] else inner,
            remedy=known or remedy or REMEDIES.get(operation, OTHER),
            is_logging=logging is not None,
        )
        self.count[wait] += 1
        if self.on_wait is not None:
            self.on_wait(wait)


class _DispatchWatch(TorchDispatchMode):
    """Show each operation to the recorder before it runs."""

    def __init__(self, recorder: WaitRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_cuda = self._recorder.device.type == "cuda"
        found = judge_call(func, args, kwargs, is_cuda=is_cuda)
        if not is_cuda and func is torch.ops.aten.lift_fresh.default and _makes_logged_tensor(_frames()):
            found = "copy to the device", ""
        if found is not None:
            self._recorder.note(*found)
        if found is None or not is_cuda:
            return func(*args, **kwargs)
        # The warning of this call would count it a second time; in a backward it comes late and without its line.
        torch.cuda.set_sync_debug_mode("default")
        try:
            return func(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("warn")


def order_waits(waits: Iterable[tuple[HostWait, int]]) -> list[tuple[HostWait, int]]:
    """Return waits and counts, most frequent first, then by line.

    Example:
        >>> order_waits([])
        []
    """
    return sorted(waits, key=lambda item: (-item[1], item[0].place.file, item[0].place.line, item[0].operation))


def is_library(file: str) -> bool:
    """Return whether a file belongs to an installed package, the standard library or this package."""
    return file.startswith(("<", *_ROOTS)) or any(f"{os.sep}{site}{os.sep}" in file for site in _SITES)


@contextlib.contextmanager
def _sync_warnings(note: Callable[[str], None]) -> Iterator[None]:
    """Count the warnings of the sync debug mode instead of showing them."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=_SYNC_WARNING)
        # torch says once that the mode misses some syncs; the docstring of the recorder says which.
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        show = warnings.showwarning

        def count(message: Any, *args: Any, **kwargs: Any) -> None:
            if str(message).startswith(_SYNC_WARNING):
                note("synchronizing CUDA operation")
            else:
                show(message, *args, **kwargs)

        warnings.showwarning = count
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


@contextlib.contextmanager
def _watched(owner: Any, name: str, note: Callable[[str], None]) -> Iterator[None]:
    """Note the calls of a function or method inside the block."""
    is_own, original = name in vars(owner), getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        note(name)
        return original(*args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def _frames() -> list[FrameType]:
    """Return the frames of the running code, innermost first, up to the loop of Lightning that called the step."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith(_LOOP):
        if not any(part in frame.f_code.co_filename for part in _MACHINERY):
            frames.append(frame)
        frame = frame.f_back
    return frames


def _is_logging(frame: FrameType) -> bool:
    """Return whether Lightning passes values of ``self.log`` to the loggers in a frame."""
    return frame.f_code.co_name == "log_metrics" and _CONNECTOR in frame.f_code.co_filename


def _makes_logged_tensor(frames: list[FrameType]) -> bool:
    """Return whether the innermost frame is Lightning's, making a tensor of a number that ``self.log`` was given."""
    code = frames[0].f_code if frames else None
    return code is not None and code.co_name == _TO_TENSOR[0] and code.co_filename.endswith(_TO_TENSOR[1])


def _describe_logging(frame: FrameType) -> str:
    """Return text with the names of the values that Lightning reads for a logger."""
    names = frame.f_locals.get("metrics")
    shown = f" ({', '.join(map(str, names))})" if isinstance(names, Mapping) else ""
    return f"reading what self.log was given{shown}, on logged steps only"


def _backward_place(frames: list[FrameType]) -> Place | None:
    """Return the node of the backward that runs in C++, without a line of Python; None outside of a backward."""
    if frames and not frames[0].f_code.co_filename.endswith(_ENGINE):
        return None
    # The stack of a backward thread has only the recorder.
    node = torch._C._current_autograd_node()
    if node is None:
        return Place("<backward>", 0, "autograd", "C++ code in the backward, such as a gradient hook of DDP")
    return Place("<backward>", 0, node.name(), f"backward of the operation that made {node.name()}")


def _reads_host(frames: list[FrameType], *, host_only: tuple[str, ...]) -> bool:
    """Return whether a read is of tensors that are on the host in a run on CUDA too.

    They are batches that the loader makes, step counters of optimizers, checks that only a CPU makes, and what code
    under the paths host_only reads.
    """
    inner = frames[0]
    is_step_counter = inner.f_code.co_name == "_get_value" and "torch/optim/" in inner.f_code.co_filename
    return (
        is_step_counter
        or inner.f_code.co_filename.startswith(host_only)
        or "one_hot(" in _place(inner).text
        or any(frame.f_code.co_filename.endswith(_FETCHERS) for frame in frames)
    )


def _place(frame: FrameType) -> Place:
    file = frame.f_code.co_filename
    return Place(file, frame.f_lineno, frame.f_code.co_name, linecache.getline(file, frame.f_lineno).strip())
