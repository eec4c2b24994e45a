"""The sizes of tiny models in one line."""

NAMES = {
    "vocab": "vocab_size",
    "width": "hidden_size",
    "inner": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "key_heads": "num_key_value_heads",
    "head_width": "head_dim",
    "positions": "max_position_embeddings",
}


def sizes(**values):
    """Return fields of a configuration of transformers, with the short names of ``NAMES`` written out."""
    return {NAMES.get(name, name): value for name, value in values.items()}


def tiny_qwen3(**changes):
    """Return the fields of a tiny Qwen3, with those that are changed or added, under either name."""
    fixed = {"model_type": "qwen3", "vocab": 97, "width": 32, "inner": 48, "layers": 2, "heads": 4, "key_heads": 2}
    return {**sizes(**fixed, head_width=16, positions=128), **sizes(**changes)}
