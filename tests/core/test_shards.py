"""local_values: the tensor of this rank, whatever autograd is told."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_fastft.core.shards import local_values


@pytest.fixture
def mesh():
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


def test_a_shard_is_the_same_object_at_each_call_and_not_part_of_a_graph(mesh):
    rows = torch.arange(6.0).view(3, 2)
    weight = torch.nn.Parameter(DTensor.from_local(rows, mesh, [Shard(0)]))
    assert local_values(weight) is local_values(weight)
    assert torch.equal(local_values(weight), rows)
    assert not local_values(weight).requires_grad


@pytest.mark.parametrize("tensor", [torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.nn.Buffer(torch.ones(2))])
def test_a_whole_tensor_is_returned(tensor):
    assert local_values(tensor) is tensor
