"""The gate of an expert: the activation between its two products, and its gradient."""
