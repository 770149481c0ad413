"""What happens once before the first request; read `start_runner.py` first. Kernels are precompiled, the largest step is measured,
the runner is made and warmed up."""
