"""LoRA adapters without torch: what a folder of PEFT holds, which names the server knows, and what a request carries.

| module | used by | for |
|---|---|---|
| `adapter_names.py` | frontends | the adapters that the server knows by name, in a file that all frontends share |
| `adapter_files.py` | frontends, supervisor, workers | read and check a folder's adapter |
| `resource.py` | both | write an adapter into a request, and read it |

`srt/model_loader/model_adapters.py` loads an adapter's tensors, and `srt/layers/adapters.py` multiplies with them.
"""
