"""Account for a worker's memory, compute how many tokens the KV memory holds, and allocate the state of that size."""
