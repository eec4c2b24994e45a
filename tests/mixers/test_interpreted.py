"""The mixers on their GPU kernels, in Triton's interpreter on the CPU."""

import pytest

from tests.support.children import in_both_lanes, run_in_interpreter


@pytest.mark.slow(60)
@in_both_lanes
def test_mixers_on_gpu_kernels_pass_their_tests(lane):
    pytest.importorskip("fla", reason="needs fla-core")
    run_in_interpreter("tests/mixers/triton_mixers.py", lane=lane)
