"""KV memory: the scheduler's page allocator and prefix tree, and the worker's tensors (`memory_pool.py`, which loads torch)."""
