"""Key and value heads, once for each query head that shares them."""
