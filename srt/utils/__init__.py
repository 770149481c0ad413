"""Helpers with at least two users and no better home."""
