"""The scan of Mamba-2 over packed documents, forward and backward."""
