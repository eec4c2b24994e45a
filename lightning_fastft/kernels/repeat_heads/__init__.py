"""Repetition of key and value heads for the query heads that share them."""
