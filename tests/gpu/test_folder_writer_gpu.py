"""Saves in the background from a GPU: pinned copies, also of tensors far smaller than a page, hold the values of the
call while the next steps run.
"""

import pytest
import torch
import torch.distributed as dist

from lightning_fastft.checkpoint.folder_writer import FolderWriter
from lightning_fastft.checkpoint.folders import load_folder
from tests.checkpoint.test_folder_writer import PLENTY, gate  # noqa: F401

pytestmark = pytest.mark.gpu


def test_copies_are_pinned_and_hold_the_values_of_the_call(tmp_path, gate):  # noqa: F811
    dist.init_process_group("cpu:gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    writer = FolderWriter(torch.device("cuda", 0), None)
    module = torch.nn.ParameterList([torch.randn(size, device="cuda") for size in (2, 3, 700, 100_000)] * 25)
    seen = []
    stage = writer._stager.stage
    writer._stager.stage = lambda pieces, **options: seen.append(stage(pieces, **options)) or seen[-1]
    for number in range(3):
        gate.clear()
        before = [parameter.detach().clone() for parameter in module]
        writer.save({"state_dict": module.state_dict()}, tmp_path / f"{number}.ckpt", host_bytes=PLENTY)
        with torch.no_grad():
            for parameter in module:
                parameter.mul_(2.0)
        gate.set()
        assert writer.finish() is None
        loaded = torch.nn.ParameterList([torch.zeros_like(parameter) for parameter in module])
        load_folder(tmp_path / f"{number}.ckpt", module=loaded, optimizers=[], strict=True)
        assert all(torch.equal(one, two) for one, two in zip(before, loaded, strict=True))
    assert all(tensor.is_pinned() for tensor in seen[-1]["state_dict"].values())
    # Later saves reuse the copies.
    pointers = [[tensor.data_ptr() for tensor in staged["state_dict"].values()] for staged in seen]
    assert pointers[1] == pointers[0]
    writer.close()
    dist.destroy_process_group()
