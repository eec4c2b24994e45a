"""Tests of what a run report is made of."""
