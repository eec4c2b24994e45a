"""The low-rank part of an adapted linear layer."""
