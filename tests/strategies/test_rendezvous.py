"""Ranks that do not meet: the error names the rank, the node, the address and what to do, and comes in time."""

import os
import signal
import socket
import time
import warnings
from datetime import timedelta

import pytest

from lightning_fastft.core.errors import RendezvousError
from lightning_fastft.strategies import rendezvous
from lightning_fastft.strategies.ddp import FastFTDDPStrategy
from lightning_fastft.strategies.fsdp2 import FastFTFSDPStrategy
from tests.faults.ranks import free_port, join
from tests.faults.saves import fork
from tests.support.training_parts import PlainModule, packed_loader, quiet_trainer, tiny_llama

TIMEOUT = timedelta(seconds=2)


def meet_in_vain(folder, number, *, port, strategy, write):
    """One of two nodes; the other one never starts. Its error goes to the parent."""
    join(number, num_ranks=2, port=port, are_nodes=True)
    rendezvous.NOTICE_S = 0.3
    trainer = quiet_trainer(folder, strategy=strategy, num_nodes=2)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with pytest.raises(RendezvousError) as error:
            trainer.fit(PlainModule(tiny_llama()), packed_loader())
    os.write(write, f"{error.value}\n{' '.join(str(warning.message) for warning in found)}".encode())


@pytest.mark.parametrize(
    ("number", "strategy", "is_taken", "reason", "remedy"),
    [
        (0, FastFTDDPStrategy, False, "1/2 clients joined", "Start the same command on every node"),
        (0, FastFTFSDPStrategy, True, "EADDRINUSE", "set another MASTER_PORT"),
        (1, FastFTDDPStrategy, False, "trying to connect", "Check that node 0 runs the job"),
    ],
)
def test_a_rendezvous_without_the_other_node_says_what_is_missing(tmp_path, number, strategy, is_taken, reason, remedy):
    begin = time.monotonic()
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1] if is_taken else free_port()
        if is_taken:
            taken.listen()
        child, read = fork(
            lambda write: meet_in_vain(tmp_path, number, port=port, strategy=strategy(timeout=TIMEOUT), write=write)
        )
        said = os.read(read, 2**16).decode()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(read)
    assert f"rank {number} of 2, on node {number}, with MASTER_ADDR:MASTER_PORT=127.0.0.1:{port}" in said
    assert reason in said
    assert remedy in said
    assert ("Still waiting for the other ranks" in said) == (not is_taken)
    assert time.monotonic() - begin < 20


def test_an_interrupt_ends_a_rank_that_waits_for_the_others(tmp_path):
    def wait(write):
        # In the background of a shell interrupts are ignored, in a child too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        join(0, num_ranks=2, port=free_port(), are_nodes=True)
        rendezvous.NOTICE_S = 0.3
        rendezvous._warn_of_waiting = lambda where: os.kill(os.getpid(), signal.SIGINT)
        strategy = FastFTDDPStrategy(timeout=timedelta(seconds=30))
        quiet_trainer(tmp_path, strategy=strategy, num_nodes=2).fit(PlainModule(tiny_llama()), packed_loader())

    begin = time.monotonic()
    child, read = fork(wait)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGINT
    os.close(read)
    assert time.monotonic() - begin < 20
