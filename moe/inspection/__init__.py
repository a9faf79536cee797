"""The router's behaviour: traces, tables, plots and the report."""
