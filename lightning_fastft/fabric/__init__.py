"""Lightning Fabric: the parts of this package in a loop of the user's own."""

from lightning_fastft.fabric.fabric import FastFTFabric

__all__ = ["FastFTFabric"]
