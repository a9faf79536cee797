"""What `python -m eval conformance` calls for a case: tables of our functions by T5's names."""
