"""Cross-entropy on labelled rows, in chunks, without full logits."""
