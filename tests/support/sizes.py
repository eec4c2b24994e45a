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
