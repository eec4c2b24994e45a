"""Choose the tests of `make test-seams`: of those in some folders, test functions with all their cases that together call
every function of transformers and PEFT that all of them call, those with the most new ones for their time first.

    python -m pytest -p tests.support.seam_choice -m 'not gpu and not multi_gpu and not fault and not slow' \\
        tests/hf tests/patches tests/mixers tests/moe tests/fused

writes tests/seams.txt.
"""

import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest

PLACE = Path(__file__).parents[1] / "seams.txt"
LIBRARIES = ("/transformers/", "/peft/")
_codes, _called, _calls, _seconds = {}, set(), defaultdict(set), Counter()


def _note(frame, event, argument):
    # The hash of a code object takes longer than the call.
    if event == "call" and id(frame.f_code) not in _called:
        _called.add(id(frame.f_code))
        _codes[id(frame.f_code)] = frame.f_code


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    _called.clear()
    start = time.process_time()
    threading.setprofile(_note)
    sys.setprofile(_note)
    try:
        return (yield)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        test = item.nodeid.partition("[")[0]
        _seconds[test] += time.process_time() - start
        places = ((code.co_filename, code.co_firstlineno) for code in map(_codes.get, _called))
        _calls[test].update(place for place in places if any(library in place[0] for library in LIBRARIES))


def pytest_sessionfinish():
    missing, chosen = set().union(*_calls.values()), []
    while missing:
        chosen.append(max(_calls, key=lambda test: len(_calls[test] & missing) / (_seconds[test] + 0.01)))
        missing -= _calls[chosen[-1]]
    # What later ones call too was chosen for nothing.
    for test in tuple(chosen):
        others = set().union(*(_calls[other] for other in chosen if other != test))
        if _calls[test] <= others:
            chosen.remove(test)
    PLACE.write_text("".join(f"{test}\n" for test in sorted(chosen)), encoding="utf-8")
