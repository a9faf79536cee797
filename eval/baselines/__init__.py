"""Answers without a neural network, which a fine-tuned model has to beat."""
