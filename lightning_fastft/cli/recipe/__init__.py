"""Choose a recipe for ``fastft init``: lengths of the data, a plan on the GPU, and the text of a config.

``lengths`` measures the data, ``plans`` chooses method, pack length and steps, ``text`` writes the config. Read
``plans`` first.
"""
