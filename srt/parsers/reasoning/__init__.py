"""The formats in which models mark their reasoning, a file each."""
