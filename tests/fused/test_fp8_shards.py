"""The e4m3 form of sharded weights: as one device quantises the whole, for shards of different sizes and copies, also
after the weights were gathered; undone, the weights themselves are gathered.
"""

import pytest

from tests.support.two_ranks import run_two_ranks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("num_ranks", "num_copies", "parks"),
    # 32 and 16 rows on 3 ranks: the last shard is smaller.
    [(2, 1, "parks"), (3, 1, "parks"), (3, 1, "stays"), (4, 2, "parks")],
)
def test_ranks_gather_what_one_device_quantises(num_ranks, num_copies, parks):
    run_two_ranks("tests.fused.fp8_shards_worker", num_copies, parks, num_ranks=num_ranks)
