"""From logits to ids: penalties and biases, filters, and the draw."""
