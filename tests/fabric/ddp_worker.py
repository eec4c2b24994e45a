"""Two gloo ranks: a loop under Fabric trains the same weights as the Trainer; run by ``test_fabric.py``."""

import pytest
import torch
from lightning.fabric import Fabric

from lightning_fastft import FastFTDDPStrategy, OffloadCheckpointing
from lightning_fastft.core.errors import CheckpointNotSavedError, ContextError
from lightning_fastft.fabric import FastFTFabric
from tests.support.fabric_loops import make_data, make_model, make_optimizer, run_fabric, run_trainer


def check_equal(policy):
    losses, gradients, weights = run_trainer(
        policy, devices=2, strategy=FastFTDDPStrategy(activations=OffloadCheckpointing(policy))
    )
    fabric_losses, fabric_gradients, fabric_weights = run_fabric(policy, devices=2, strategy="ddp")
    assert fabric_losses == losses
    assert all(torch.equal(fabric_gradients[name], gradients[name]) for name in gradients)
    assert all(torch.equal(fabric_weights[name], weights[name]) for name in weights)
    return fabric_losses, fabric_weights


def check_misuse():
    fabric = FastFTFabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model = make_model("qwen3")
    loader = fabric.setup_datamodule(make_data())
    with fabric:
        wrapped, _ = fabric.setup(model, make_optimizer(model))
        batch = next(iter(loader))
        with pytest.raises(ContextError, match="past DDP"):
            fabric.backward(model(**batch).loss)
        # Only rank 0 writes, and its write fails.
        with pytest.raises(CheckpointNotSavedError):
            fabric.save("/proc/none/run.ckpt", {"model": wrapped})


def main():
    losses, weights = check_equal("recompute")
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    both = fabric.all_gather({"loss": losses[0], "weight": next(iter(weights.values()))})
    assert both["loss"][0] != both["loss"][1]
    assert torch.equal(both["weight"][0], both["weight"][1])
    check_misuse()


if __name__ == "__main__":
    main()
