"""Watchdog: its clock counts in training batches only, it takes its traces away, and it blames the right rank."""

import json
import mmap
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset

from lightning_fastft import PackedTraining, Watchdog
from lightning_fastft.core.errors import OptionError
from lightning_fastft.monitor import rank_watch
from lightning_fastft.monitor.rank_watch.beats import RECORD_BYTES, Beat, Phase, read_beat, write_beat
from lightning_fastft.monitor.rank_watch.verdict import find_blamed, find_slow_node, read_frames
from lightning_fastft.monitor.rank_watch.watch import SETTLE_S, descendants
from lightning_fastft.packing.loader import ENDLESS
from lightning_fastft.strategies.even_batches import check_even_batches
from tests.faults.saves import fork
from tests.support.training_parts import PlainModule, packed_batches, packed_loader, quiet_trainer, tiny_llama

TIMEOUT_S = 1.0
# Long enough to be found: more than the timeout and what other ranks are given to speak.
LONG_S = TIMEOUT_S + SETTLE_S + 1.0


class Slow(Callback):
    """Sleeps in one hook, once."""

    def __init__(self, hook):
        self.hooks = {hook}

    def _sleep(self, hook):
        if hook in self.hooks:
            self.hooks.remove(hook)
            time.sleep(LONG_S)

    def on_train_start(self, trainer, pl_module):
        self._sleep("start")

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._sleep(f"batch {batch_idx}")

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if not trainer.sanity_checking:
            self._sleep("validation")

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self._sleep("save")

    def on_train_epoch_end(self, trainer, pl_module):
        self._sleep("epoch end")


def start(folder, hook):
    """A run in a child that is slow in one hook."""

    def run(write):
        callbacks = [
            PackedTraining(),
            Watchdog(timeout_s=TIMEOUT_S),
            Slow(hook),
            ModelCheckpoint(dirpath=folder, every_n_train_steps=4),
        ]
        trainer = quiet_trainer(
            folder, callbacks=callbacks, max_steps=8, val_check_interval=6, enable_checkpointing=True
        )
        trainer.fit(PlainModule(tiny_llama()), packed_loader(6), packed_loader(1))

    return fork(run)


def test_only_a_batch_behind_the_first_steps_must_not_take_long(tmp_path):
    hooks = ("start", "batch 1", "validation", "save", "epoch end", "batch 4")
    # Side by side: they sleep.
    children = {hook: start(tmp_path / hook, hook) for hook in hooks}
    codes = {}
    for hook, (child, read) in children.items():
        codes[hook] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.close(read)
    assert codes == {**dict.fromkeys(hooks, 0), "batch 4": -9}
    # The watching process of the last one ends a moment later.
    time.sleep(1.0)
    left = {hook: [path.name for path in (tmp_path / hook).glob("*watchdog*")] for hook in hooks}
    assert left == {**{hook: [] for hook in hooks}, "batch 4": ["watchdog-step=5.txt"]}


def test_nothing_is_left_behind_a_run_and_a_second_one_is_watched_anew(tmp_path):
    watchdog = Watchdog()
    seen = []

    class Look(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            # As SLURM does with all processes of a job.
            for number in (signal.SIGUSR1, signal.SIGTERM):
                os.kill(watchdog._process.pid, number)
            time.sleep(0.1)
            assert watchdog._process.poll() is None
            seen.append(
                (
                    watchdog._process.pid,
                    [path.name.startswith(".watchdog-") for path in tmp_path.iterdir()],
                    watchdog.status()[0].state,
                )
            )

    for _ in range(2):
        quiet_trainer(tmp_path, callbacks=[PackedTraining(), watchdog, Look()], max_steps=1).fit(
            PlainModule(tiny_llama()), packed_loader()
        )
        assert list(tmp_path.iterdir()) == []
    assert len({pid for pid, _, _ in seen}) == 2
    assert [found for _, *found in seen] == [[[True], "active"]] * 2
    assert not any(os.path.exists(f"/proc/{pid}") for pid, _, _ in seen)


def test_an_error_of_one_rank_alone_stops_the_watch(tmp_path):
    watchdog = Watchdog()

    class Fail(Callback):
        def on_train_batch_start(self, *args):
            raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        quiet_trainer(tmp_path, callbacks=[PackedTraining(), watchdog, Fail()]).fit(
            PlainModule(tiny_llama()), packed_loader()
        )
    assert watchdog._process is None
    assert list(tmp_path.iterdir()) == []


def test_a_watching_process_that_is_gone_is_said(tmp_path):
    watchdog = Watchdog()

    class Kill(Callback):
        def on_train_batch_start(self, *args):
            if watchdog._process is not None:
                watchdog._process.kill()
                time.sleep(0.2)

    with pytest.warns(UserWarning, match="its process ended with code -9; ranks are no longer watched"):
        quiet_trainer(tmp_path, callbacks=[PackedTraining(), watchdog, Kill()], max_steps=2).fit(
            PlainModule(tiny_llama()), packed_loader()
        )
    assert watchdog.status()[0].state == "refused"


def test_no_step_adds_a_beat_without_a_run():
    watchdog = Watchdog()
    watchdog._beat(Phase.FORWARD)
    assert watchdog.status()[0].state == "inactive"
    with pytest.raises(OptionError, match="timeout_s"):
        Watchdog(timeout_s=0.5)


def test_a_beat_arrives_as_it_was_written():
    with mmap.mmap(-1, RECORD_BYTES) as memory:
        assert read_beat(memory) == Beat(is_first=False)
        beat = Beat(7, 3, 2, Phase.FAILED, False, 12.5, 0.25, "ValueError: ä")
        write_beat(memory, beat)
        assert read_beat(memory) == beat
        write_beat(memory, beat._replace(text="x" * 10_000))
        assert set(read_beat(memory).text) == {"x"}


def state(rank, *, num_batches=5, phase=Phase.FORWARD, condition="runs", failed_at_s=0.0, gone_at_s=0.0, frames=()):
    times = {"failed_at_s": failed_at_s, "gone_at_s": gone_at_s}
    return {
        "rank": rank,
        "num_batches": num_batches,
        "phase": phase,
        "condition": condition,
        "frames": list(frames),
        **times,
    }


WAITING = "barrier (/lib/torch/distributed/x.py:1)"


@pytest.mark.parametrize(
    ("states", "blamed"),
    [
        ([state(0, phase=Phase.BACKWARD), state(1)], [1]),
        ([state(0, num_batches=4, phase=Phase.BETWEEN), state(1)], [0]),
        # Rank 0 saves alone, and the other one waits for it.
        ([state(0, num_batches=4, phase=Phase.PAUSED), state(1)], [0]),
        ([state(0), state(1)], [0, 1]),
        ([state(0, frames=[WAITING]), state(1, frames=["work (/home/me/train.py:3)"])], [1]),
        ([state(0, frames=[WAITING]), state(1, frames=[WAITING])], [0, 1]),
        ([state(0), state(1, phase=Phase.OPTIMIZER, condition="stopped")], [1]),
        ([state(0, phase=Phase.FAILED, failed_at_s=2.0), state(1, phase=Phase.FAILED, failed_at_s=1.0)], [1]),
        ([state(0, phase=Phase.FAILED, failed_at_s=2.0, condition="gone"), state(1, condition="gone")], [1]),
        ([state(0), state(1, phase=Phase.LEAVING, condition="gone")], [1]),
        # The connection of rank 0 to a lost node failed.
        ([state(0, phase=Phase.FAILED, condition="gone"), state(1, condition="lost")], [1]),
        ([state(0, condition="stopped"), state(1, condition="lost"), state(2, condition="lost")], [1, 2]),
        # The end of rank 1 took rank 0 along.
        ([state(0, condition="gone", gone_at_s=2.0), state(1, condition="gone", gone_at_s=1.9)], [1]),
    ],
)
def test_who_is_to_blame(states, blamed):
    assert [found["rank"] for found in find_blamed(states)] == blamed


@pytest.mark.parametrize(
    ("times", "slow"),
    [
        # Ranks 0 and 1 are on node 0, ranks 2 and 3 on node 1, and so on.
        ([1.0, 1.0, 1.4, 1.4], (1, 1.4, 1.0)),
        ([1.4, 1.5, 1.0, 1.1], (0, 1.45, 1.05)),
        ([1.0, 1.0, 1.25, 1.25], None),
        # One slow rank does not make its node slow.
        ([1.0, 1.0, 1.0, 1.4], None),
        ([1.0, 1.0, 1.0, 1.0, 2.0, 2.0], (2, 2.0, 1.0)),
        # Some ranks have too few measured micro-batches.
        ([1.0, 1.0, 0.0, 2.0], None),
        ([1.0, 2.0], None),
    ],
)
def test_a_slow_node_is_found_by_the_times_of_its_ranks(times, slow):
    states = [{"node": rank // 2, "host": f"host{rank // 2}", "own_s": own_s} for rank, own_s in enumerate(times)]
    found = find_slow_node(states)
    node, host, *seconds = found or (None, None)
    assert (found and (node, *map(pytest.approx, seconds))) == slow
    assert found is None or host == f"host{node}"


def test_the_main_thread_is_read_from_a_dump():
    dump = (
        'Thread 0x2 (most recent call first):\n  File "/t.py", line 1 in other\n\nCurrent thread 0x1 (most recent '
        "call first):\n"
    )
    assert read_frames(dump + '  File "/a b.py", line 3 in <lambda>\n  File "/c.py", line 4 in outer\n') == [
        "<lambda> (/a b.py:3)",
        "outer (/c.py:4)",
    ]
    assert read_frames("") == []


def test_processes_below_a_rank_are_found_but_for_those_that_watch():
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys; subprocess.Popen(['sleep', '30']); print(1, flush=True); input()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    watching = subprocess.Popen([sys.executable, "-c", "input()", rank_watch.ENTRY], stdin=subprocess.PIPE)
    child.stdout.readline()
    found = descendants(os.getpid())
    assert child.pid in found
    assert watching.pid not in found
    assert len(descendants(child.pid)) == 1
    for pid in descendants(child.pid):
        os.kill(pid, 9)
    child.communicate(b"\n")
    watching.communicate(b"\n")


def test_the_process_needs_nothing_but_the_standard_library():
    # It must not load torch, once per rank.
    code = (
        f"import sys; sys.argv = ['']; import runpy; runpy.run_path({rank_watch.ENTRY!r}); print(sorted(sys.modules))"
    )
    loaded = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True).stdout
    assert "rank_watch.watch" in loaded
    assert "torch" not in loaded
    assert "lightning." not in loaded


def test_one_rank_needs_no_comparison_of_batches(tmp_path):
    assert check_even_batches(quiet_trainer(tmp_path)).state == "inactive"


def test_the_length_of_a_stream_is_no_number(monkeypatch):
    trainer = SimpleNamespace(world_size=2, num_training_batches=ENDLESS)
    monkeypatch.setattr("lightning_fastft.strategies.even_batches.on_all_ranks", lambda make, **_: [make()] * 2)
    status = check_even_batches(trainer)
    assert (status.state, status.reason) == ("active", "batches without an end on each of 2 ranks")


class Stream(IterableDataset):
    def __iter__(self):
        yield from packed_batches(4)


def test_a_loader_without_a_length_is_said_in_the_table(tmp_path):
    def run(write):
        from tests.faults.ranks import free_port, make_strategy

        names = {
            "RANK": 0,
            "LOCAL_RANK": 0,
            "WORLD_SIZE": 1,
            "GROUP_RANK": 0,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": free_port(),
        }
        os.environ |= {name: str(value) for name, value in names.items()}
        trainer = quiet_trainer(tmp_path, strategy=make_strategy("fastft_ddp"), max_steps=1)

        class Look(Callback):
            def on_train_batch_start(self, trainer, *args):
                # One rank in this test; what two say is of the gathered numbers.
                type(trainer).world_size = property(lambda self: 2)
                found = check_even_batches(trainer)
                os.write(write, json.dumps(found).encode())

        trainer.callbacks.append(Look())
        trainer.fit(PlainModule(tiny_llama()), DataLoader(Stream(), batch_size=None))

    child, read = fork(run)
    name, found, reason, remedy = json.loads(os.read(read, 4096))
    os.close(read)
    os.waitpid(child, 0)
    assert (name, found) == ("even batches", "inactive")
    assert "no length" in reason
    assert "limit_train_batches" in remedy
