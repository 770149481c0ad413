"""Models that the library transformers runs, over our attention and KV memory. `library_model.py` is the whole model; start there.

Only a worker that serves such a model loads the library.
"""
