"""Stable sort of routed slots by expert."""
