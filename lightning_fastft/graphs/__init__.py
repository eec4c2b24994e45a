"""Run decoder layers from CUDA graphs.

The forward and the backward of a fused layer each become one graph launch. ``launch_bound`` determines whether
training is launch-bound. ``cuda_recorder`` is the only file that calls the CUDA graph API. Read ``layer_graphs`` first.
"""
