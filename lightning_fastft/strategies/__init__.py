"""Lightning strategies that own the checkpointing plugin and install packed training."""
