"""Tests of the packing floor."""
