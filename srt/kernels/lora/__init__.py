"""Products with the matrices of LoRA adapters."""
