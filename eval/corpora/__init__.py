"""English text on this machine, for corpora: packages, WordNet, dictionaries of dictd."""
