"""Conversion of stacks of thin matrices between an expert-last and an expert-first layout."""
