"""A decode step of one or two rows through all layers in one kernel."""
