"""CUDA graphs of decode steps and of steps with prompts, and the same work compiled by PyTorch."""
