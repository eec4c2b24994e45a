"""Mixture of experts from plain PyTorch: routed tokens through grouped products, without a loop over experts and without a host wait."""
