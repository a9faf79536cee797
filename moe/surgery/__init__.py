"""Model surgery: makes one model of another by changing its feed-forward layers, without training."""
