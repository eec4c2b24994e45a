"""Packed batches: rows become ids and labels, documents share packs, metadata is built once per batch."""
