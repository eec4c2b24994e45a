"""Residual add and RMSNorm in one pass, and their gradient."""
