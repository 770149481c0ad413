"""Parsers of a model's output: what is text, what is reasoning, what is a call of a tool. Pure: no I/O, no torch, no HTTP.

`srt.parsers.output_parser` is the module for other packages. A parser is fed pieces of text and returns events; the same text gives
the same events, however it is cut into pieces. Every format has a file of its own, in `tool_calls/` or `reasoning/`.
"""
