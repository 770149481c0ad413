"""CUDA graphs of decode steps and of steps with prompts, and decode steps compiled by PyTorch."""
