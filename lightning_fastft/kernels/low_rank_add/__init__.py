"""A thin product added to a wide matrix."""
