"""Columns times factors, and the gradients, each in one pass over memory."""
