"""Corpus, tokenizer, span corruption, packing and the resumable batch sources."""
