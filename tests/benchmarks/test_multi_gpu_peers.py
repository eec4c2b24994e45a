import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from benchmarks import multi_gpu, multi_gpu_peers, multi_gpu_tables
from benchmarks.ruler.building import build
from benchmarks.ruler.workloads import WORKLOADS


def record_of(strategy, *, losses=(5.0, 4.9), mode="recompute", tokens_per_s=100.0, reason=""):
    return {
        "title": f"{strategy} x2",
        "strategy": strategy,
        "accumulate": 1,
        "num_ranks": 2,
        "num_sharing": 1,
        "num_warmup": 8,
        "num_tokens": 8,
        "optim_bits": 32,
        "workload": "w",
        "mode": mode,
        "is_one_document": False,
        "tokens_per_s": tokens_per_s,
        "losses": list(losses),
        "reason": reason,
        "summary": {"median": 1.0, "p10": 1.0, "p90": 1.0, "n": 3},
        "peak_gib": [1.0, 1.0],
        "reserved_gib": [2.0, 2.0],
        "build_s": 1.0,
        "versions": {"torch": "2", "lightning_fastft": "1", "accelerate": "3", "unsloth": "4", "liger_kernel": "5"},
    }


@pytest.mark.parametrize(
    "text",
    ["transformers", "transformers-fsdp:offload", "transformers-ddp:keep+resident", "unsloth-ddp:off+liger", "trl-ddp"],
)
def test_unknown_peers_and_modes_are_refused(text):
    with pytest.raises(ValueError, match=r"peers are|Modes"):
        multi_gpu_peers.parse_peer(text)
    with pytest.raises(SystemExit):
        multi_gpu.main(["multi", "--out", "unused", "--runs", text])


def test_peers_need_built_weights(tmp_path):
    with pytest.raises(ValueError, match="build"):
        multi_gpu.main(["multi", "--out", str(tmp_path), "--workload", "tiny", "--runs", "transformers-ddp"])


def test_rows_name_the_system_and_its_packages():
    rows = multi_gpu_tables.result_rows(record_of("transformers-fsdp", mode="keep+liger"), command="c")
    assert {row["system"] for row in rows} == {"transformers-fsdp x2"}
    assert rows[0]["version"] == "liger_kernel 5; torch 2; accelerate 3"
    (reserved,) = [row["value"] for row in rows if "reserved" in row["metric"]]
    assert reserved == 2.0
    ours = multi_gpu_tables.result_rows(record_of("fsdp"), command="c")
    assert {row["system"] for row in ours} == {"ours fsdp x2"}


@pytest.mark.parametrize(("losses", "verdict"), [((5.0, 4.9), "pass"), ((5.0, 4.88), "FAIL"), ((20.0, 19.6), "FAIL")])
def test_losses_of_peers_are_held_to_ours(losses, verdict):
    peer = record_of("transformers-fsdp", losses=losses, tokens_per_s=80.0)
    failed = {"title": "unsloth-ddp x2", "reason": "stopped after 5 s"}
    table = multi_gpu_tables.multi_table([record_of("fsdp"), record_of("ddp"), peer, failed])
    (bar,) = [line for line in table.splitlines() if "bar: transformers" in line]
    assert bar.endswith(verdict)
    assert "fsdp x2: 1.250 times transformers-fsdp x2" in table
    assert "stopped after 5 s" in table


def test_a_whole_model_is_not_taken_for_a_sharded_one():
    model = torch.nn.Linear(2, 2)
    model.config = SimpleNamespace(num_hidden_layers=1)
    assert "0 FSDP2 units" in multi_gpu_peers.check_units(model, is_sharded=False)
    with pytest.raises(ValueError, match="FSDP2"):
        multi_gpu_peers.check_units(model, is_sharded=True)


def test_ranks_of_a_run_that_takes_too_long_end_with_it(tmp_path, monkeypatch):
    # torchrun starts ranks in sessions of their own: ending its group alone would leave them on the GPUs.
    script, mark = tmp_path / "rank.py", tmp_path / "pid"
    script.write_text(
        f"import os, pathlib, time\npathlib.Path({str(mark)!r}).write_text(str(os.getpid()))\ntime.sleep(600)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", str(script)]
    own_wait = subprocess.Popen.wait

    def wait(process, timeout=None):
        """Time is over as soon as the rank runs."""
        while not mark.exists() and process.poll() is None:
            time.sleep(0.05)
        return own_wait(process, timeout=0.05 if timeout == 40.0 else timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    log = tmp_path / "log.txt"
    reason = multi_gpu.run_command(command, log=log, seconds=40.0, environment=dict(multi_gpu.os.environ))
    assert "stopped" in reason
    deadline = time.monotonic() + 10
    while subprocess.run(["kill", "-0", mark.read_text()], capture_output=True, check=False).returncode == 0:
        assert time.monotonic() < deadline
        time.sleep(0.1)


# Over a minute: with the long half of the other tests.
@pytest.mark.fault
def test_transformers_takes_the_steps_of_ours(tmp_path):
    build(WORKLOADS["tiny"], root=tmp_path / "root", device="cpu", dtype=torch.float32)
    runs = ["fsdp", "transformers-fsdp:recompute", "transformers-fsdp:keep+resident", "transformers-ddp:recompute"]
    arguments = ["--out", str(tmp_path / "out"), "--root", str(tmp_path / "root"), "--device", "cpu", "--mode", "keep"]
    sizes = ["--workload", "tiny", "--tokens", "256", "--steps", "2", "--warmup", "2"]
    assert multi_gpu.main(["multi", *arguments, *sizes, "--runs", *runs]) == 0
    records = [json.loads(line) for line in (tmp_path / "out" / "raw.jsonl").read_text().splitlines()]
    assert [record["reason"] for record in records] == [""] * 4
    ours, *peers = records
    for peer in peers:
        assert peer["losses"] == pytest.approx(ours["losses"], rel=1e-5)
        # A and B of seven layers in each of two blocks.
        assert peer["num_trained_tensors"] == 28
        assert (" 0 whole tensors" in peer["description"]) == ("fsdp" in peer["strategy"]), peer["description"]
