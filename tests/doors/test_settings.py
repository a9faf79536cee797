"""Every class of settings takes any value of any field, or refuses it by an error of this library."""

import re
from dataclasses import MISSING, fields
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe import MeshConfig, SparseConfig, STMoEConfig
from moe.data.span_corruption import Noise, tokens_length
from moe.errors import MoEError
from moe.serving.sampling import Sampling
from moe.surgery.distillation import DistillationSettings
from moe.training.optim_recipe import OptimRecipe
from moe.training.recipe import (
    FinetuneRecipe,
    MixtureRecipe,
    PairsRecipe,
    PretrainRecipe,
    SpanCorruptionRecipe,
    TrainingRecipe,
)
from tests.models.tiny import FIELDS

LAYER = {"d_model": 7, "d_ff": 11, "num_experts": 5}
DISTILLATION = {"temperature": 2.0}

# Sizes between 64 and 10**9 are left out: 1,000 layers or a d_ff of a million are legal, and only take
# long.
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-9, 64),
    st.integers(min_value=10**9, max_value=10**30),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["no", "null", "1", "-1", "nan", "\ud800", "x" * 300]),
)
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(st.text(max_size=5), SCALARS, max_size=3),
)

CLASSES: dict[type, dict[str, Any]] = {
    SparseConfig: LAYER,
    STMoEConfig: FIELDS,
    MeshConfig: {},
    OptimRecipe: {},
    TrainingRecipe: {},
    SpanCorruptionRecipe: {},
    PairsRecipe: {},
    MixtureRecipe: {},
    PretrainRecipe: {},
    FinetuneRecipe: {},
    DistillationSettings: DISTILLATION,
    Sampling: {},
}

PYTHONS_WORDS = re.compile(
    r"\b(Key|Type|Attribute|Index|Value|Unicode\w+|Recursion|Overflow|Assertion)Error"
)


def defaults_of(kind: type) -> dict[str, Any]:
    """Returns the plain settings of a class, each with a value that it takes."""
    given_fields = CLASSES[kind]
    if kind is STMoEConfig:  # others are those of transformers
        return given_fields
    values = {field.name: field.default for field in fields(kind) if field.default is not MISSING}
    return values | given_fields


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_value_is_taken_or_refused_in_clear_words(kind, data):
    name = data.draw(st.sampled_from(sorted(defaults_of(kind))))
    value = data.draw(VALUES)
    try:
        kind(**{**CLASSES[kind], name: value})
    except MoEError as error:
        text = str(error)
        assert 0 < len(text) < 2000 and not PYTHONS_WORDS.search(text), text


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("value", [{"a": 1}, [None], "no such thing", float("nan")])
def test_numbers_flags_and_choices_refuse_other_types_by_name(kind, value):
    for name, default in defaults_of(kind).items():
        if isinstance(default, bool | int | float):
            with pytest.raises(MoEError, match=name):
                kind(**{**CLASSES[kind], name: value})


@settings(max_examples=300, deadline=None)
@given(SCALARS, SCALARS, SCALARS)
def test_any_noise_gives_a_length_or_is_refused(inputs_length, density, span_length):
    try:
        assert tokens_length(inputs_length, Noise(density, span_length), 100) >= 2
    except MoEError as error:
        assert str(error)
