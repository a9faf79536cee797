"""The routing view: one interactive page on a trace."""
