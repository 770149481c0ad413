"""Reading checkpoints: which part of which tensor each rank needs, and copying it in."""
