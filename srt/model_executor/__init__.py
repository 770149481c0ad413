"""What a worker does with a plan: read `model_runner.py` first, then `forward_batch_info.py`.

`loaded_model.py` loads the weights; `step/` plans a step and carries its inputs and outputs, `graphs/` captures and replays CUDA graphs,
`memory/` says what fits and holds the device's state, `startup/` makes the runner and prepares it before the first request.
"""
