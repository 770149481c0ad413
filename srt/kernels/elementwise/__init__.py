"""Kernels that process each element once: norms, rotation, activation, and gathering a decode step's inputs."""
