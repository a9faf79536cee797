"""Sparse layers compared with dense layers and with those of other libraries."""
