"""What experts do: taken away, one by one."""
