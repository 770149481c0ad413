"""What happens once before the first request: the largest step, a warm-up, and the record of compiled kernels."""
