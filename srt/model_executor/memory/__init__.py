"""How much memory a worker has, what it keeps, how many tokens the KV memory holds, and the state whose size that is."""
