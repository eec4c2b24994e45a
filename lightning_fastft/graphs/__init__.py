"""Run decoder layers from CUDA graphs.

Fused layers enter; their forward and backward leave as one graph launch each. ``launch_bound`` finds out whether
training is launch-bound. ``cuda_recorder`` is the only file that calls the CUDA graph API. Read ``layer_graphs`` first.
"""
