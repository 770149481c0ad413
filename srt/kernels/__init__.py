"""Kernels for NVIDIA GPUs, in Triton and in CUDA's C++, a folder for each kind of work.

A `.cu` file lies beside the module that launches it.
"""
