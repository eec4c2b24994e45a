"""DoRA: the factor of each output column, columns times factors, and the gradients, each in one pass over memory."""
