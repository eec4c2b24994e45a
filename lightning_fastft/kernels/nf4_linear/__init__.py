"""NF4 weights of linear layers made dense in one launch."""
