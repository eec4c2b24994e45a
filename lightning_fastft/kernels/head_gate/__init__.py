"""Heads times an activation of a gate that a joint projection holds, normed first if the family does so; forward and
backward in one pass each.
"""
