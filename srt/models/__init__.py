"""Model families, a file each. `decoder.py` has the code that they share, `registry.py` maps architecture names to classes."""
