"""Routes of models that make vectors of texts, or score them: embeddings, classes, ranks. `vectors.py` runs the texts."""
