"""The models of this library under transformers' mixins, which are taken as they are.

`python -m tests.mixins` puts a copy of this file beside transformers' package `tests`.
"""

import unittest
from importlib import import_module

import torch
from transformers.models.auto import modeling_auto

from moe import STMoEConfig, STMoEEncoderModel, STMoEForConditionalGeneration, STMoEModel

common = import_module("tests.test_modeling_common")
configurations = import_module("tests.test_configuration_common")
generation = import_module("tests.generation.test_utils")

# The mixins look into these tables, and not at the classes, for which model has a loss and labels.
modeling_auto.MODEL_MAPPING_NAMES["st_moe"] = "STMoEModel"
modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES["st_moe"] = (
    "STMoEForConditionalGeneration"
)

BATCH = 13
ENCODER_LENGTH = 7
DECODER_LENGTH = 9
VOCABULARY = 99


class ModelTester:
    """Configuration and inputs, of the sizes that transformers' tester of T5 has."""

    batch_size = BATCH
    encoder_seq_length = ENCODER_LENGTH
    decoder_seq_length = DECODER_LENGTH
    hidden_size = 32
    num_hidden_layers = 2
    num_attention_heads = 4
    vocab_size = VOCABULARY
    is_training = True

    def __init__(self, has_decoder=True, **fields):
        self.has_decoder = has_decoder
        self.seq_length = DECODER_LENGTH if has_decoder else ENCODER_LENGTH
        self.is_training = has_decoder  # the encoder alone has no loss
        self.fields = fields

    def get_config(self):
        return STMoEConfig(
            vocab_size=VOCABULARY,
            d_model=self.hidden_size,
            d_ff=40,
            d_kv=8,
            num_layers=self.num_hidden_layers,
            num_decoder_layers=self.num_hidden_layers,
            num_heads=self.num_attention_heads,
            num_experts=4,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            dropout_rate=0.1,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
            **self.fields,
        )

    def prepare_config_and_inputs_for_common(self):
        tokens = common.ids_tensor([BATCH, ENCODER_LENGTH], VOCABULARY).clamp(2)
        inputs = {
            "input_ids": tokens,
            "attention_mask": common.random_attention_mask([BATCH, ENCODER_LENGTH]),
        }
        if self.has_decoder:
            inputs["decoder_input_ids"] = common.ids_tensor([BATCH, DECODER_LENGTH], VOCABULARY)
            inputs["decoder_attention_mask"] = torch.ones(BATCH, DECODER_LENGTH, dtype=torch.int64)
        return self.get_config(), inputs


# As T5 is: a sequence does not depend on its neighbours, and the mixins count outputs, among which
# there are no logits of routers.
FIELDS = {"eval_capacity_factor": None, "output_router_logits": False}


class STMoETest(common.ModelTesterMixin, generation.GenerationTesterMixin, unittest.TestCase):
    """The model without a head and the one with it."""

    all_model_classes = (STMoEModel, STMoEForConditionalGeneration)
    is_encoder_decoder = True
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self):
        self.model_tester = ModelTester(**FIELDS)

    def test_config(self):
        tester = configurations.ConfigTester(self, config_class=STMoEConfig, d_model=32)
        tester.run_common_tests()


class STMoEEncoderTest(common.ModelTesterMixin, unittest.TestCase):
    """The encoder alone."""

    all_model_classes = (STMoEEncoderModel,)
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self):
        self.model_tester = ModelTester(has_decoder=False, is_encoder_decoder=False, **FIELDS)
