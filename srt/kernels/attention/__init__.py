"""Attention over the paged KV memory, and kernels that write to it. Read `paged_kv.py` first."""
