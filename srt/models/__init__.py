"""Models, built as their layer specs say; families are declared in `srt/utils/families/`. `causal_lm.py` is the whole model."""
