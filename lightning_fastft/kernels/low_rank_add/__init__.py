"""A low-rank product added to a wide matrix."""
