"""Checkpoints that are whole or refused, and runs that go on from them as if they had never stopped."""
