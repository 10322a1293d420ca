"""The bundled model: its world, its tokenizer, its training and its evaluation."""
