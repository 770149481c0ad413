"""Turn the scheduler's plan of a step into the model's tensors, and the drawn ids into the step's result."""
