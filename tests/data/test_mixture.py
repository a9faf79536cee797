"""Mixtures. Oracles: rates by hand; counting what a long stretch of the stream holds; asking in another order."""

import pytest

from moe.data.mixture import mixing_rate
from moe.errors import ConfigError

SUPERGLUE = {  # training examples that T5's preprocessors make
    "boolq": 9427,
    "cb": 250,
    "copa": 400,
    "multirc": 27243,
    "record": 138854,
    "rte": 2490,
    "wic": 5428,
    "wsc": 259 + 1322,
}


@pytest.mark.parametrize(
    ("num_examples", "options", "rate"),
    [
        (138854, {}, 138854.0),
        (138854, {"maximum": 65536}, 65536.0),
        (138854, {"maximum": 65536, "temperature": 2.0}, 256.0),  # sqrt(65536)
        (250, {"temperature": 2.0}, 15.811388300841896),
        (100, {"maximum": 150, "temperature": 2.0, "scale": 4.0}, 12.24744871391589),  # sqrt(150): scaled before
        (100, {"maximum": 150, "scale": 1.25}, 125.0),
        (7, {"maximum": 7}, 7.0),
    ],
)
def test_a_rate_is_scaled_then_capped_then_raised(num_examples, options, rate):
    assert mixing_rate(num_examples, **options) == rate


def test_the_papers_cap_changes_record_alone():
    capped = {name: mixing_rate(number, maximum=65536) for name, number in SUPERGLUE.items()}
    assert {name for name in SUPERGLUE if capped[name] != SUPERGLUE[name]} == {"record"}
    assert sum(capped.values()) == 65536 + 46819


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"maximum": 0}, "mixture.maximum is 0; expected at least 1"),
        ({"temperature": 0.0}, "mixture.temperature is 0.0; expected above 0"),
        ({"temperature": float("nan")}, "mixture.temperature is nan"),
        ({"scale": 0.0}, "scale is 0.0"),
        ({"num_examples": -1}, "num_examples is -1"),
    ],
)
def test_numbers_that_give_no_rate_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        mixing_rate(**{"num_examples": 5, **options})
