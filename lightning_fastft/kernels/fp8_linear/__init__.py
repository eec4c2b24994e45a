"""Linear layers in fp8: quantisation of rows and weights in one pass each, and their products."""
