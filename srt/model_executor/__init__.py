"""Run a scheduler's plans on a worker. Read `model_runner.py` first, then `forward_batch_info.py`.

`loaded_model.py` loads the weights. `step/` plans a step and moves its inputs and outputs. `graphs/` captures and replays CUDA graphs.
`memory/` computes what fits and holds the device's state. `startup/` creates the runner and prepares it for the first request.
"""
