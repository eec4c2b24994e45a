"""Turn valid rows into token ids with trained flags.

``chunks`` groups the rows of a source, ``tokenisation`` turns a chunk into tokens, ``formatter`` encodes its rows, and
``workers`` spreads chunks over processes. Read ``formatter`` first.
"""
