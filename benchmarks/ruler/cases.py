"""One case of an arm (a system in one mode on one label share), and the recorder that judges it, times it and writes
its raw record.
"""

from __future__ import annotations

import gc
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.ruler import judge as judging
from benchmarks.ruler.attention import describe_attention
from benchmarks.ruler.clocks import find_card
from benchmarks.ruler.measure import (
    HostWaits,
    StepClock,
    device_memory_gib,
    peak_memory_gib,
    pinned_host_gib,
    summarise_ms,
)
from benchmarks.ruler.proof import TrainingProof
from benchmarks.ruler.systems import SYSTEMS
from benchmarks.ruler.workloads import Pack, Workload, WorkloadFiles

# Above this step time, 10 steps are measured instead of 30.
LONG_STEP_MS = 3000.0
NUM_LONG_STEPS = 10
# Fewest timed steps if the time of a case is limited.
LEAST_STEPS = 10
MAX_GRADIENT_NORM = 1.0
# bitsandbytes' AdamW with moments in 8 bits, and each system's own fused one; ours has further ones.
OPTIMIZERS = ("adamw_8bit", "adamw_fused")
OUR_OPTIMIZERS = (*OPTIMIZERS, "adamw_fused_8bit", "muon_adamw")
REFERENCE_ONLY = "asked for its gradients only"
# Adapters, and all weights.
LEARNING_RATE, FULL_LEARNING_RATE = 2e-4, 1e-5
# Exceptions that end one case and not its process; the driver handles a killed process.
_CASE_FAILURES = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ImportError,
    AssertionError,
    OSError,
    ArithmeticError,
)


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Args:
        workload: Name of the workload.
        system: One of ARMS.
        mode: Policy for activations and further parts, for example "recompute" or "keep+liger".
        label_share: Share of tokens that are trained.
        optimizer: One of OUR_OPTIMIZERS; for a peer, one of OPTIMIZERS.
        num_warmup: Steps before the first timed one, at least 1; the first of them is the judged step.
        num_steps: Timed steps; 0 to write reference gradients only.
        diagnose: Whether a case that fails the judge is still timed for the raw log (it gets no row).
        half: Number of the process, from 1, if several share the timed steps of a row; 0 if one takes them all.
        repeat: Label of a repetition of the same case, for example "A/A".
        is_judged: Whether a case of the plain arm is compared with existing reference gradients, instead of writing
            them.
        most_seconds: Limit of the timed steps, of which there are at least LEAST_STEPS; 0 for all of num_steps.
        is_fresh: Whether it is the first of its process, so that its first steps compile as those of a user do.
        call: Number of the command that measured it, from 1: a row may be completed on another machine.
    """

    workload: str
    system: str
    mode: str
    label_share: float = 1.0
    optimizer: str = "adamw_8bit"
    num_warmup: int = 6
    num_steps: int = 30
    diagnose: bool = False
    half: int = 0
    repeat: str = ""
    is_judged: bool = False
    most_seconds: float = 0.0
    is_fresh: bool = False
    call: int = 1

    @property
    def title(self) -> str:
        """Name in the table."""
        return f"{self.system} {self.mode}{' ' + self.repeat if self.repeat else ''}"

    @property
    def num_long_steps(self) -> int:
        """Timed steps if a step takes longer than LONG_STEP_MS."""
        return NUM_LONG_STEPS if self.half == 0 else (NUM_LONG_STEPS + 1) // 2


class CaseRecorder:
    """Follow one case step by step.

    In every step call ``batch_arrived`` with the batch before it is copied to the device, ``backward_done`` before
    gradients are clipped, and ``step_done`` after the optimizer; stop when it returns True. Step 0 is judged on the
    first pack; the last warm-up step counts host syncs and is not timed. Timed steps must prove that they train
    (benchmarks/ruler/proof.py). The whole run, from the first batch to the last timed step, is timed by the host;
    comparisons of gradients are not part of it (``not_counted``).

    Args:
        case: The case to measure.
        files: The built workload.
        packs: Packs in training order.
        is_cuda: Whether steps run on a GPU.
        is_reference: Whether this case's gradients become the reference (the first case of the plain arm).
    """

    def __init__(
        self, case: Case, *, files: WorkloadFiles, packs: list[Pack], is_cuda: bool, is_reference: bool = False
    ) -> None:
        self.case = case
        self._files = files
        self._packs = packs
        self._is_cuda = is_cuda
        self._is_reference = is_reference
        self._clock = StepClock(is_cuda=is_cuda)
        self._waits: HostWaits | None = None
        dtype = base_dtype(is_cuda=is_cuda) if files.workload.is_full else None
        self._proof = TrainingProof(share=case.label_share, learning_rate=learning_rate_of(files.workload), dtype=dtype)
        self._num_timed = case.num_steps
        self._is_stopped = False
        self._run_start, self._not_counted_s = 0.0, 0.0
        self.step = 0
        self.verdict: judging.Verdict | None = None
        self.record: dict[str, Any] = {**asdict(case), "title": case.title}
        if is_cuda:
            torch.cuda.init()
            gc.collect()
            torch.cuda.empty_cache()
            self.record["peak_gib_before"] = peak_memory_gib(is_cuda=True)
            torch.cuda.reset_peak_memory_stats()

    @property
    def num_total(self) -> int:
        """Maximum number of steps of this case."""
        return self.case.num_warmup + self.case.num_steps

    def pack_at(self, step: int) -> Pack:
        """Return the pack of a step, never the same twice: after the end of the token file its packs are changed."""
        num_rounds, number = divmod(step, len(self._packs))
        return self._packs[number].renewed(num_rounds)

    def batch_arrived(self, batch: Any = None) -> None:
        """Count the tokens of the batch; start counting host syncs in the last warm-up step.

        Args:
            batch: Arguments of the model, on the host or on the device; a case without any gets no row.
        """
        if self.step == 0:
            self._run_start = time.perf_counter()
        self._proof.see_batch(batch)
        if self.step == self.case.num_warmup - 1:
            self._waits = HostWaits(is_cuda=self._is_cuda)
            self._waits.__enter__()

    def backward_done(self, model: torch.nn.Module, *, loss: torch.Tensor | None = None) -> None:
        """Record the host syncs so far; judge the gradients and record the loss in step 0, and check the gradients in
        timed steps.
        """
        if self._waits is not None:
            self.record["host_waits"] = self._waits.count_so_far()
            if self.step == 0:
                # The judge reads gradients on the host.
                self.close()
        if self.step >= self.case.num_warmup:
            self._proof.see_gradients(is_last=self.step == self.case.num_warmup + self._num_timed - 1)
        if self.step == 0:
            self.record["attention"] = describe_attention(model)
            self.record["first_loss"] = None if loss is None else float(loss)
            with self.not_counted():
                self._judge(model)

    @contextmanager
    def not_counted(self) -> Iterator[None]:
        """Exclude work of the benchmark itself from the time of the whole run; syncs with the device at both ends."""
        self._synchronize()
        start = time.perf_counter()
        yield
        self._synchronize()
        self._not_counted_s += time.perf_counter() - start

    def _synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()

    def close(self) -> int | None:
        """Stop counting host syncs and return their number; None if they are not being counted."""
        if self._waits is None:
            return None
        waits, self._waits = self._waits, None
        waits.__exit__(None, None, None)
        self.record["host_wait_places"] = waits.places[:20]
        return waits.count

    def step_done(self) -> bool:
        """Record the end of a step; return True when the case is over."""
        num_waits = self.close()
        if num_waits is not None:
            self.record["host_waits_step"] = num_waits
        self.step += 1
        self._clock.mark()
        num_warmup = self.case.num_warmup
        if self.step == num_warmup:
            self._begin_timing()
        over = self._is_stopped or self.step >= num_warmup + self._num_timed
        if over and self.step > num_warmup and "ms" not in self.record:
            self._finish()
        if over:
            self.release()
        return over

    def release(self) -> None:
        """Drop the reference to the model: a recorder outlives its case."""
        self._proof.release()

    def _judge(self, model: torch.nn.Module) -> None:
        self.verdict = self._compare(model)
        self.record["verdict"], self.record["num_trained"] = self.verdict.to_dict(), self._proof.num_trained
        self.record["dtypes"] = self._proof.dtypes
        print(f"judge: {self.case.title}, labels {self.case.label_share:.0%}: {self.verdict.describe()}", flush=True)
        self._is_stopped = not self.verdict.passed and not self.case.diagnose
        if not self.verdict.passed:
            self._num_timed = min(self._num_timed, self.case.num_long_steps)
        if self._is_cuda:
            # The copies for the comparison do not count as memory of the system.
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def _compare(self, model: torch.nn.Module) -> judging.Verdict:
        """Compare gradients, names and counts of trained tensors with the plain arm's, and the batch with its pack."""
        gradients = judging.view_gradients(model)
        path = self._files.reference(self.case.label_share)
        reference = None
        if self._is_reference:
            verdict = judging.first_reference(gradients)
        elif path.exists():
            reference = judging.load_gradients(path)
            verdict = judging.judge(
                gradients,
                reference,
                device="cuda" if self._is_cuda else "cpu",
                limits=judging.limits_of(self.case.mode),
            )
        else:
            verdict = judging.Verdict(False, "the plain arm left no gradients to compare with")
        reasons = [verdict.reason, self._proof.see_model(model, reference), self._proof.batch_problem(self.pack_at(0))]
        verdict = replace(verdict, passed=not any(reasons), reason="; ".join(filter(None, reasons)))
        if self._is_reference and verdict.passed:
            judging.save_gradients(gradients, path)
        return verdict

    def _begin_timing(self) -> None:
        # One device sync, between warm-up and timing; the clock continues from the mark just made.
        warmup_ms = self._clock.read_ms()
        self.record["warmup_ms"] = warmup_ms
        if warmup_ms and min(warmup_ms[-2:]) > LONG_STEP_MS:
            self._num_timed = min(self._num_timed, self.case.num_long_steps)
        if warmup_ms and self.case.most_seconds:
            num_steps = int(self.case.most_seconds * 1e3 / min(warmup_ms[-2:]))
            self._num_timed = min(self._num_timed, max(LEAST_STEPS, num_steps))
        self._proof.begin()
        if self._is_cuda:
            self.record["peak_gib_warmup"] = peak_memory_gib(is_cuda=True)
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.reset_peak_host_memory_stats()
        self._clock = StepClock(is_cuda=self._is_cuda)
        self._clock.mark()
        self.record["timed_from"] = time.time()

    def _finish(self) -> None:
        step_ms = self._clock.read_ms()
        self.record["timed_to"] = time.time()
        whole_run_s = time.perf_counter() - self._run_start - self._not_counted_s
        timed = [self.pack_at(self.case.num_warmup + number) for number in range(len(step_ms))]
        num_tokens = sum(pack.input_id_T.size for pack in timed)
        num_labelled = sum(int((pack.label_T(self.case.label_share) != -100).sum()) for pack in timed)
        summary = summarise_ms(step_ms)
        # In padded batches the number of real tokens varies from step to step, so the rate is that of all steps
        # together.
        is_even = len({pack.input_id_T.size for pack in timed}) == 1
        seconds = (summary["median"] if is_even else sum(step_ms) / len(step_ms)) / 1e3
        peak_gib = peak_memory_gib(is_cuda=self._is_cuda)
        if "graphs" in self.case.mode.split("+") or self.record.get("graphs_check"):
            # Memory of graphs counts as free between their recordings, but it stays reserved for them.
            peak_gib["allocated"] = peak_gib["reserved"]
        self.record.update(
            whole_run_s=whole_run_s,
            num_whole_steps=self.step,
            device_memory_gib=device_memory_gib(is_cuda=self._is_cuda),
            ms=step_ms,
            summary=summary,
            is_even=is_even,
            peak_gib=peak_gib,
            tokens_per_s=num_tokens / len(timed) / seconds,
            labelled_tokens_per_s=num_labelled / len(timed) / seconds,
            mean_tokens_per_s=num_tokens / sum(step_ms) * 1e3,
            num_tokens=num_tokens,
            num_labelled=num_labelled,
            pinned_host_gib=pinned_host_gib(is_cuda=self._is_cuda),
            not_training=self._proof.problem(timed),
            num_movable=self._proof.num_movable,
        )


class CaseLog:
    """Append each finished case to a JSON-lines file at once, so that a killed process loses only its current case."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, record: dict[str, Any]) -> None:
        """Append one record."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def run_case(recorder: CaseRecorder, body: Callable[[CaseRecorder], None], *, log: CaseLog) -> dict[str, Any]:
    """Run one case and write its record, also if it fails.

    Args:
        recorder: The recorder of the case.
        body: Trains until the recorder returns True.
        log: Takes the record.
    """
    record = recorder.record
    record["versions"], record["command"], record["card"] = versions(), " ".join(sys.argv), find_card()
    try:
        body(recorder)
    except case_failures() as error:
        recorder.close()
        recorder.release()
        record["error"] = f"{type(error).__name__}: {str(error)[:600]}"
        record["traceback"] = traceback.format_exc()[-6000:]
        traceback.print_exc()
        drop_frames(error)
    record["reason"] = reason_without_row(record)
    log.write(record)
    median = record.get("summary", {}).get("median")
    state = (
        record["reason"]
        or f"{median:.1f} ms, {record['tokens_per_s']:.0f} tokens/s, {record['peak_gib']['allocated']:.1f} GiB"
    )
    print(
        f"case: {record['workload']} {recorder.case.title}, labels {recorder.case.label_share:.0%}: {state}", flush=True
    )
    return record


def drop_frames(error: BaseException) -> None:
    """Clear the frames of an exception and of its causes: they hold the activations of the failed step."""
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        link = chain.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            link.__traceback__ = None
            chain += [link.__context__, link.__cause__]


def case_failures() -> tuple[type[BaseException], ...]:
    """Return the exceptions that end a case and not its process; Triton's errors have no common built-in base."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return _CASE_FAILURES
    return (*_CASE_FAILURES, TritonError)


def reason_without_row(record: dict[str, Any]) -> str:
    """Return why a case gets no row in the table; empty when it gets one."""
    if "error" in record:
        return str(record["error"])
    verdict = record.get("verdict")
    if verdict is None:
        return "no step was judged"
    if not verdict["passed"]:
        return str(verdict["reason"])
    if record.get("not_training"):
        return f"not training: {record['not_training']}"
    if record["num_steps"] == 0:
        return REFERENCE_ONLY
    return "" if "summary" in record else "it ended before a step was timed"


def versions() -> dict[str, str]:
    """Return the versions of the system, and the device."""
    packages = {"python": platform.python_version()}
    of_systems = (package for system in SYSTEMS.values() for package in system.packages)
    for package in dict.fromkeys((*of_systems, "lightning", "triton", "nvidia-cudnn-frontend", "fla-core")):
        try:
            packages[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        packages["device"] = torch.cuda.get_device_name()
    return packages


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], *, name: str, is_cuda: bool, learning_rate: float = LEARNING_RATE
) -> torch.optim.Optimizer:
    """Return the optimizer of a loop of the benchmark; plain AdamW on a CPU, where bitsandbytes has none."""
    if name == "adamw_8bit" and is_cuda:
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(list(parameters), lr=learning_rate, weight_decay=0.0)
    return torch.optim.AdamW(list(parameters), lr=learning_rate, weight_decay=0.0, fused=is_cuda)


def learning_rate_of(workload: Workload) -> float:
    """Return the peak learning rate that every system trains a workload with."""
    return workload.learning_rate or (FULL_LEARNING_RATE if workload.is_full else LEARNING_RATE)


def base_dtype(*, is_cuda: bool) -> torch.dtype:
    """Return the dtype of weights and compute: bf16 on a GPU, fp32 in CPU tests."""
    return torch.bfloat16 if is_cuda else torch.float32


def quantization_config(workload: Workload, *, is_cuda: bool) -> Any:
    """Return the BitsAndBytesConfig of every system, or None."""
    if workload.quantization is None:
        return None
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=base_dtype(is_cuda=is_cuda),
    )
