"""One step of AdamW for many tensors at once, and the norm of their gradients."""
