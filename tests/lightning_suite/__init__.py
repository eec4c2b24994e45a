"""Lightning's own tests, run with our strategy as the default strategy of one device."""
