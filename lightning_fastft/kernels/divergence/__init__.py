"""Divergence of a student's distribution from a teacher's on labelled rows, in chunks, without full logits."""
