"""One module per system that is measured; each runs in a process of its own."""
