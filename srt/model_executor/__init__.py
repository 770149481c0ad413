"""What a worker does with a plan: read `model_runner.py` first, then `forward_batch_info.py`.

`step/` plans a step and carries its inputs and outputs, `graphs/` captures and replays CUDA graphs, `memory/` says what fits,
`startup/` prepares kernels before the first request.
"""
