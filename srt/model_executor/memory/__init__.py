"""How much memory a worker has, what it keeps, and how many tokens the KV memory holds."""
