"""Use what a run wrote: ``fastft chat``, ``eval``, ``export`` and ``push``.

``opening`` builds the model of a checkpoint or folder, ``card`` writes its model card, ``gguf`` and ``modelfile``
convert it for llama.cpp and Ollama. Read ``opening`` first.
"""
