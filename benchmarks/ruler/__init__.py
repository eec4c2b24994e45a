"""The ruler: the same packs, weights and adapters for every system; gradients are compared before steps are timed."""
