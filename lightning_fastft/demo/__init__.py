"""The generated data set of the demo."""
