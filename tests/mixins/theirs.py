"""Transformers' own tests of T5, to compare with; see ours.py."""

from importlib import import_module

t5 = import_module("tests.models.t5.test_modeling_t5")

T5EncoderOnlyModelTest = t5.T5EncoderOnlyModelTest


class T5ModelTest(t5.T5ModelTest):
    """With the classes and the lengths that ours.py has.

    The other two classes of T5 need inputs and targets of one length.
    """

    all_model_classes = (t5.T5Model, t5.T5ForConditionalGeneration)

    def setUp(self):
        super().setUp()
        self.model_tester = t5.T5ModelTester(self, encoder_seq_length=7, decoder_seq_length=9)
