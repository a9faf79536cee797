"""The commands of `stmoe eval`, one file each."""
