"""Planted faults: copies of a module with one edit each, and the tests that a check sees every one of them.

An edit is a piece of source text with what to exchange in braces: ``"mean_scale{ + eps => }"`` drops ``+ eps`` behind
``mean_scale``. Spaces and line breaks between words do not count when the text is looked up, so that the formatter may
wrap it. The text must be in the module exactly once.
"""

import ast
import importlib.util
import inspect
import os
import re
from pathlib import Path

import pytest
import torch

# Files of Triton kernel tests run in a process of their own, because TRITON_INTERPRET must be set before Triton is
# imported: test_interpreted.py interprets them on the CPU, tests/gpu runs them on the device.
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
# A second run shows a race, of which the interpreter has none; that inputs stay is asserted.
NUM_RUNS = 1 if DEVICE == "cpu" else 2
# The interpreter multiplies the bits of bf16 where a kernel multiplies matrices.
NARROW = torch.float16 if DEVICE == "cpu" else torch.bfloat16
_EXCHANGE = re.compile(r"\{([^{}]*) => ([^{}]*)\}")


def far(tensor):
    """Return up to three rows so far apart that offsets of the last one need more than 32 bits.

    On a CPU only one page of each row is real; the rest of the buffer is a hole.
    """
    rows = torch.empty(2**31 + 64, dtype=tensor.dtype, device=tensor.device).as_strided(tensor.shape, (2**30, 1))
    return rows.copy_(tensor)


def fixtures_of(functions, device=DEVICE):
    """Return the fixtures ``functions`` and ``device``, which tests of a twin take and `shared_tests` replaces."""
    return pytest.fixture(lambda: functions, name="functions"), pytest.fixture(lambda: device, name="device")


def shared_tests(module, functions):
    """Return the tests of a module that take ``functions``, and the fixtures with which they test other functions."""
    tests = {
        name: test
        for name, test in vars(module).items()
        if name.startswith("test_") and "functions" in inspect.signature(test).parameters
    }
    return tests | dict(zip(("functions", "device"), fixtures_of(functions)))


def planted_faults(module, check, faults, *, except_in=None, errors=AssertionError):
    """Return two tests: ``check`` fails for a copy of the module with any one of the faults, and passes for the module.

    Args:
        module: The module to plant faults in.
        check: Takes a module; raises if it is wrong.
        faults: Edits by the name of the fault.
        except_in: Name of a function whose text is left alone.
        errors: What the check may raise.
    """

    @pytest.mark.skipif(
        DEVICE == "cuda" and torch.cuda.is_available(),
        reason="kernels with faults, or with faulty addresses, write out of bounds; a CPU shows them",
    )
    @pytest.mark.parametrize("fault", faults)
    def fault_is_seen(fault, tmp_path):
        faulty = load_with_fault(module, faults[fault], tmp_path, except_in=except_in)
        with pytest.raises(errors):
            check(faulty)

    def same_check_passes():
        check(module)

    return fault_is_seen, same_check_passes


def load_with_fault(module, edit, folder, *, except_in=None):
    """Return a copy of a module with one edit."""
    path = Path(folder) / "faulty_module.py"
    path.write_text(edited(Path(module.__file__).read_text(), edit, except_in=except_in))
    spec = importlib.util.spec_from_file_location(f"faulty_{Path(folder).name}", path)
    faulty = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(faulty)
    return faulty


def edited(source, edit, *, except_in=None):
    """Return source text with an edit made, except in the function of a name."""
    functions = [node for node in ast.walk(ast.parse(source)) if getattr(node, "name", None) == except_in]
    (kept,) = [ast.get_source_segment(source, node) for node in functions] if except_in else [""]
    before, after = source.split(kept) if kept else (source, "")
    # Text outside of braces, and the two sides of each exchange, in turn.
    parts = _EXCHANGE.split(edit)
    assert len(parts) > 1, f"{edit!r} exchanges nothing"
    pattern = r"\s*?".join(f"({_words(part)})" for place, part in enumerate(parts) if place % 3 != 2)
    found = [match for text in (before, after) for match in re.finditer(pattern, text)]
    assert len(found) == 1, f"{edit!r} is there {len(found)} times"
    (match,) = found
    text = match.string
    for group in range(match.re.groups, 0, -1):
        # The second, fourth ... group is the text to exchange, and the right side is the third part of its three.
        if group % 2 == 0:
            text = text[: match.start(group)] + parts[group // 2 * 3 - 1] + text[match.end(group) :]
    return text + kept + after if match.string is before else before + kept + text


def _words(text):
    """Return a pattern for the words of a text, whatever space is between them."""
    words = [r",?\s*\)" if word == ")" else re.escape(word) for word in re.findall(r"\w+|[^\w\s]", text)]
    return r"\s*".join(words)
