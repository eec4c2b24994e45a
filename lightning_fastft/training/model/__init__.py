"""Make, call and save the model of a tuner, as plain functions.

A tuner's options and the Trainer's strategy enter; a loaded, adapted and sharded model leaves, and later its files.
``tuner`` calls these functions and holds the state. Read ``construction``, then ``forward``.
"""
