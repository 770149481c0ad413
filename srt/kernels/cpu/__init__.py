"""Compiled code of ours for steps on a CPU."""
