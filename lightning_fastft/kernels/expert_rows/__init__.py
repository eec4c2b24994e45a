"""Rows of tokens in the order of their experts, and back."""
