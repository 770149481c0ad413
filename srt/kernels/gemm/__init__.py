"""Products of activations and weights, with what a layer does before and after them."""
