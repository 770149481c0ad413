"""One step: from the scheduler's plan to the tensors of the model, and from its draws to the answer."""
