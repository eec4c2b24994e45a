"""Norm of each query and key head and their rotation by position, forward and backward, on the joint output of
the q, k and v projections.
"""
