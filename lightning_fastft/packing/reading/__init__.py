"""Read rows of files, data sets and lists, without judging them. Read ``sources``."""
