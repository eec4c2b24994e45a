"""What the processes of a comparison leave, as its tests make it up."""

from benchmarks.ruler.cases import Case
from benchmarks.ruler.pairs import CONTROL

OURS, PLAIN, UNSLOTH = ("ours", "keep+fused"), ("plain", "recompute"), ("unsloth", "off")


def record_of(setting, *, half, ms=100.0, n=15, repeat="", reason="", **more):
    """Return what one process of a case leaves."""
    case = Case("qwen3-14b-qlora", *setting, half=half, repeat=repeat, num_steps=n)
    found = {
        **vars(case),
        "title": case.title,
        "reason": reason,
        "versions": {"torch": "2.11.0", "device": "NVIDIA H200"},
    }
    if reason:
        return {**found, **more}
    return {
        **found,
        "ms": [ms] * n,
        "summary": {"median": ms, "mean": ms, "p10": ms, "p90": ms, "n": n},
        "num_tokens": 8192 * n,
        "num_labelled": 8000 * n,
        "tokens_per_s": 8192 / ms * 1e3,
        "peak_gib": {"allocated": 40.0 + half, "reserved": 50.0 + half},
        "pinned_host_gib": 0.5 * half,
        "host_waits": half,
        "host_waits_step": 10 * half,
        "device_memory_gib": 60.0 + half,
        "is_fresh": True,
        "whole_run_s": 7.0 + half,
        "num_whole_steps": 6 + n,
        "num_trained": 1000,
        "verdict": {"passed": True, "worst_cosine": ["a", 1 - half / 1000]},
        "timed_from": 10.0 * half,
        "timed_to": 10.0 * half + 5,
        **more,
    }


def pairs_of(setting, first_ms, second_ms, **more):
    return [record_of(setting, half=1, ms=first_ms, **more), record_of(setting, half=2, ms=second_ms, **more)]


def records_of_a_run():
    """Return the records of ours, of ours once more, of plain and of a peer, all in two processes."""
    return [
        *pairs_of(OURS, 100.0, 100.0),
        *pairs_of(OURS, 101.0, 101.0, repeat=CONTROL),
        *pairs_of(PLAIN, 250.0, 240.0),
        *pairs_of(UNSLOTH, 150.0, 152.0),
    ]
