"""Everything that writes weights to disk and reads them back."""
