"""Activation checkpointing: what is kept between forward and backward, and where."""
