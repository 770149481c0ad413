"""Kernels for NVIDIA GPUs, in Triton and in CUDA C++, with a folder for each kind of work.

A `.cu` file is beside the module that launches it. In comments, a program is a thread block, as in Triton.
"""
