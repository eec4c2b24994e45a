"""Stacks of thin matrices whose fastest axis is the expert, brought into expert order and back."""
