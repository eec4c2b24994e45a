"""Run decoder layers from CUDA graphs.

Fused layers enter; their forward and backward leave as two launches each. ``launch_bound`` finds out whether the device
waits for the host, ``cuda_recorder`` is the only file that calls CUDA's graph functions. Read ``layer_graphs`` first.
"""
