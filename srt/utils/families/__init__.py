"""Model families, a file each: what their config.json says about layers. `registry.py` lists them; nothing here loads torch."""
