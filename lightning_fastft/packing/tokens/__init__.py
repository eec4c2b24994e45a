"""Turn valid rows into token ids with trained flags, chunk by chunk. Read ``formatter``."""
