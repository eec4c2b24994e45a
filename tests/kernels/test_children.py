"""What the processes of kernel tests share: cases of a lane, and an interpreter that is told once what it would
look for at every call.
"""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.children import ROOT, thinned
from tests.support.compiling import skip_before_triton
from tests.support.covering import keep_covering_cases

# Two launches with Triton's interpreter as it is, two more with all that the plugin changes.
SCRIPT = """
import json
from unittest import mock

import torch

from tests.support import interpreter as plugin

interpreter = plugin.interpreter
from lightning_fastft.kernels.qk_rope import triton
from tests.kernels.test_qk_rope import PARTIAL, make_inputs, run_ours

torch.manual_seed(0)
inputs = make_inputs(2, PARTIAL, torch.float16)
counts, results = [], []
for _ in range(2):
    for _ in range(2):
        with mock.patch.object(interpreter, "_patch_builtin", wraps=interpreter._patch_builtin) as exchange:
            results.append(run_ours(triton, inputs, PARTIAL))
        counts.append(exchange.call_count)
    plugin.pytest_configure()
is_equal = all(torch.equal(one, other) for result in results for one, other in zip(results[0], result))
print(json.dumps({"counts": counts, "is equal": is_equal}))
"""


@pytest.mark.slow
def test_a_language_exchanged_once_computes_the_same():
    pytest.importorskip("triton")
    if tuple(int(part) for part in np.__version__.split(".")[:2]) >= (2, 4):
        skip_before_triton((3, 7), "the interpreter as it is cannot run with NumPy 2.4")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["is equal"]
    _, each_call, once, never = found["counts"]
    assert 0 == never < once < each_call / 10


def test_thinned_cases_are_all_there_and_the_rest_is_marked():
    cases = thinned((3, 5), ((1, 2), (4,), (6,)), keep=lambda number, pair: number == min(pair, 1))
    assert [(case.values, case.id, [mark.name for mark in case.marks]) for case in cases] == [
        ((3, (1, 2)), "3-0", []),
        ((3, (4,)), "3-1", ["fault"]),
        ((3, (6,)), "3-2", ["fault"]),
        ((5, (1, 2)), "5-0", ["fault"]),
        ((5, (4,)), "5-1", []),
        ((5, (6,)), "5-2", []),
    ]


def test_a_value_that_no_kept_case_has_is_refused():
    with pytest.raises(AssertionError, match="every value of axis 1"):
        thinned((3, 5), (7, 9), keep=lambda _, other: other == 0)


def test_every_value_is_in_one_of_the_fewest_cases_and_the_others_go_to_the_fault_lane():
    marked = []
    items = [
        SimpleNamespace(
            nodeid=f"{one}-{other}",
            function=keep_covering_cases,
            callspec=SimpleNamespace(params={"one": one, "other": other}),
            add_marker=lambda mark, name=f"{one}-{other}": marked.append(name),
        )
        for one in (1, 2)
        for other in (3, 4, 5)
    ]
    keep_covering_cases(reversed(items))
    assert marked == ["1-4", "2-3", "2-5"]
