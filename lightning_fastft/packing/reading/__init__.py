"""Read rows of files, data sets and lists; ``rows`` validates them. Read ``sources`` first."""
