"""All layers of a decode step in one kernel, for one or two rows."""
