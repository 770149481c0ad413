"""Hosts of a server on a Ray cluster: the process that talks to Ray, and the actor that owns a host's supervisor.

Read `placer.py` first. Nothing else of the server loads Ray; `srt/ray_serve.py` is an example that does.
"""
