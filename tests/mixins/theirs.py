"""Transformers' own tests of T5, to compare with; see ours.py."""

from importlib import import_module

t5 = import_module("tests.models.t5.test_modeling_t5")

T5ModelTest = t5.T5ModelTest
T5EncoderOnlyModelTest = t5.T5EncoderOnlyModelTest
