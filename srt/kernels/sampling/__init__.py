"""Kernels that turn logits into token ids: penalties and biases, filters, and the draw."""
