"""The ruler: the same packs, weights and adapters for every system; gradients are compared before a time is taken."""
