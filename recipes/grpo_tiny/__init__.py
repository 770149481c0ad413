"""Reinforcement learning against a running server: generate, reward, update, push the weights."""
