"""What the router does: traces, tables, plots and the report."""
