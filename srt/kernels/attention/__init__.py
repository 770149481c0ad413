"""Attention over the paged KV memory, and what writes and reads its pages. Read `paged_kv.py` first."""
