"""One module for each measured system; each runs in its own process."""
