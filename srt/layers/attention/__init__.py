"""Attention backends. Read `base.py` first: what a backend must do; `backend_choice.py` picks one."""
