"""R4, R5, R6: runs that stop and resume, and runs that receive a signal to stop."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from benchmarks.faults import child
from benchmarks.faults.default_stack import LOADERS, NUM_ROWS, numbers_of, train, trained_state
from benchmarks.faults.table import GOOD
from lightning_fastft.checkpoint.files import check_file
from tests.faults.test_signals import LENGTH, Tell
from tests.parity import resume_worker
from tests.parity.resume_worker import ACCUMULATE, NUM_STEPS, resume_from
from tests.support.datamodule_worker import SaveAt, make_rows, run_and_resume

_LIMIT_S = 600.0


def every_step(folder: Path, *, stack: str, num_trials: int) -> list[str]:
    """R4: resume from a checkpoint of each of so many optimizer steps, and compare with the run that wrote it."""
    stops = range(1, 1 + num_trials)
    if stack == "ours":
        found = child.run(folder, lambda: resume_from(stops, "lora", "one", folder), limit_s=_LIMIT_S).answer or {}
        return [GOOD if found.get(str(stop)) == [] else "otherwise than the run that went on" for stop in stops]
    # Both loaders, each with half of the steps.
    halves = [(loader, [stop for stop in stops if stop % 2 == number]) for number, loader in enumerate(LOADERS[:2])]
    ends = [
        (child.run(folder, partial(_compare, folder, loader, some), limit_s=_LIMIT_S), some) for loader, some in halves
    ]
    return [verdict for end, some in ends for verdict in end.answer or ["process died"] * len(some)]


def _compare(folder: Path, loader: str, stops: list[int]) -> list[str]:
    """Return how each resumed run differs from the one that went on."""
    place = folder / loader
    saved = ModelCheckpoint(dirpath=place, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    options: dict[str, Any] = {"loader": loader, "max_steps": NUM_STEPS, "accumulate_grad_batches": ACCUMULATE}
    whole = train(folder, make_rows(NUM_ROWS), callbacks=[saved], enable_checkpointing=True, **options)
    verdicts = []
    for stop in stops:
        resumed = train(folder, make_rows(NUM_ROWS), ckpt_path=place / f"step={stop}.ckpt", **options)
        if whole.rows[stop * ACCUMULATE :] != resumed.rows:
            verdicts.append(f"with other examples than the run that went on, weights differ ({loader})")
            continue
        is_equal = all(torch.equal(value, trained_state(whole)[name]) for name, value in trained_state(resumed).items())
        is_equal = is_equal and whole.losses[stop * ACCUMULATE :] == resumed.losses
        verdicts.append(GOOD if is_equal else f"with the right examples and other dropout, weights differ ({loader})")
    return verdicts


def every_example(folder: Path, *, stack: str, num_trials: int) -> list[str]:
    """R5: stop inside an epoch, with 0 and 2 workers, and see what is trained before and after."""
    chance = random.Random(5)
    verdicts = []
    for trial in range(num_trials):
        place = folder / str(trial)
        place.mkdir()
        num_workers, stop = 2 * (trial // len(LOADERS) % 2), chance.randrange(1, 11)
        if stack == "ours":
            found = child.run(folder, partial(_see_ours, place, num_workers, stop, max_tokens=chance.randrange(60, 90)))
            name = ""
        else:
            name = LOADERS[trial % len(LOADERS)]
            found = child.run(folder, partial(_see_default, place, name, num_workers, stop))
        verdicts.append(_judge_seen(found.answer, name))
    return verdicts


def _see_default(folder: Path, loader: str, num_workers: int, stop: int) -> list[int]:
    """Return the numbers of the rows of one epoch, trained before the stop and after it."""
    options: dict[str, Any] = {"loader": loader, "num_workers": num_workers, "max_epochs": 1}
    whole = train(folder, make_rows(), callbacks=[SaveAt(folder / "a.ckpt", micro_batch=stop)], **options)
    resumed = train(folder, make_rows(), ckpt_path=folder / "a.ckpt", **options)
    return numbers_of(whole.rows[:stop]) + numbers_of(resumed.rows)


def _see_ours(folder: Path, num_workers: int, stop: int, *, max_tokens: int) -> list[int]:
    data = {"num_workers": num_workers, "max_tokens": max_tokens}
    whole, resumed = run_and_resume(folder, save={"micro_batch": stop}, data=data, trainer={"max_epochs": 1})
    return [number for seen in (whole.seen[:stop], resumed.seen) for _, rows in seen for number in rows]


def _judge_seen(numbers: list[int] | None, loader: str) -> str:
    if numbers is None:
        return "process died"
    counts = Counter(numbers)
    num_lost = sum(not counts[number] for number in range(len(make_rows())))
    num_again = sum(count - 1 for count in counts.values())
    what = " and ".join([*(["lost"] if num_lost else []), *(["repeated"] if num_again else [])])
    return f"with examples {what} ({loader})" if what else GOOD


def signals(folder: Path, *, stack: str, num_trials: int) -> list[str]:
    """R6: SIGTERM at a random moment; the default stack saves every 5 steps, in every second trial with
    OnExceptionCheckpoint too.
    """
    chance = random.Random(6)
    verdicts = []
    for trial in range(num_trials):
        place = folder / str(trial)
        act = _train_ours if stack == "ours" else _train_default
        pid, read = child.start(folder, partial(act, place, saves_at_exceptions=bool(trial % 2)))
        num_begun = sum(len(os.read(read, 1)) for _ in range(chance.randrange(1, 40)))
        time.sleep(chance.uniform(0, 0.05))
        os.kill(pid, signal.SIGTERM)
        code = child.wait(pid, 60.0)
        while rest := os.read(read, 1 << 12):
            num_begun += len(rest)
        os.close(read)
        verdicts.append(_judge_stop(place, code, num_begun, stack=stack))
    return verdicts


def _train_ours(folder: Path, write: int, *, saves_at_exceptions: bool) -> None:
    # Ours asks for no callback.
    resume_worker.train("lora", "one", folder, keep=True, callbacks=[Tell(write)], **LENGTH)


def _train_default(folder: Path, write: int, *, saves_at_exceptions: bool) -> None:
    callbacks = [Tell(write), ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=5, save_top_k=-1)]
    callbacks += [OnExceptionCheckpoint(folder, filename="stopped")] if saves_at_exceptions else []
    options: dict[str, Any] = {
        "max_steps": LENGTH["max_steps"],
        "accumulate_grad_batches": ACCUMULATE,
        "enable_checkpointing": True,
    }
    train(folder, make_rows(NUM_ROWS), loader="StatefulDataLoader", callbacks=callbacks, **options)


def _judge_stop(folder: Path, code: int | None, num_begun: int, *, stack: str) -> str:
    """Say what is wrong with the exit code, and with the newest checkpoint."""
    if code is None:
        return "still there 60 s later"
    paths = sorted(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    faults = ["with exit code 0"] if code == 0 else []
    if not paths or (stack == "ours" and not check_file(paths[-1])):
        return " and ".join([*faults, "without a checkpoint"])
    state = torch.load(paths[-1], weights_only=True)
    num_trained = state["global_step"] * ACCUMULATE
    num_seen = (
        state["PackedDataModule"]["micro_batches"]
        if stack == "ours"
        else state["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["ready"]
    )
    if num_seen != num_trained:
        faults.append("with a checkpoint inside a window")
    elif num_trained < num_begun - ACCUMULATE:
        faults.append("with the steps since the last save lost")
    return " and ".join(faults) if faults else GOOD
