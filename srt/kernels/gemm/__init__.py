"""Products of activations and weights, fused with the operations before and after them."""
