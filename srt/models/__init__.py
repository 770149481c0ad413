"""The decoder that a model's layer specs describe. Families are declared in `srt/utils/families/`; `registry.py` builds a model."""
