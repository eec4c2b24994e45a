"""Block-diagonal matrices."""
