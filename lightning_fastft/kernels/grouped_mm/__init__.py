"""Products of rows that are sorted by expert with one matrix per expert."""
