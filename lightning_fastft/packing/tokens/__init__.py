"""Turn valid rows into token ids with trained flags.

``chunks`` groups the rows of a source, ``tokenisation`` turns a chunk into tokens, ``formatter`` encodes its rows,
``chat`` renders conversations with the tokenizer's template, and ``workers`` spreads chunks over processes.
``answer_end`` finds the token at which generation must stop. Read ``formatter`` first.
"""
