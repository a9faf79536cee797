"""Which library multiplies: by the maker of the processor, or as the environment says."""

import pytest
import torch

from moe import ConfigError
from moe.kernels.product_choice import (
    CHOICE_VARIABLE,
    choose_products,
    fixed_choice,
    is_onednn_chosen,
    products_in_use,
    use_products,
)

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has one library"
)


@pytest.fixture
def fresh(monkeypatch):
    """Gives a process that has chosen nothing."""
    before = products_in_use()
    monkeypatch.delenv(CHOICE_VARIABLE, raising=False)
    use_products(None)
    yield
    use_products(before)


def test_the_maker_of_the_processor_decides(fresh):
    assert choose_products(None, "vendor_id : AuthenticAMD\nflags : avx2") == fixed_choice("onednn")
    assert choose_products(None, "arm64") == fixed_choice("blas")

    use_products(choose_products(None, "vendor_id : GenuineIntel\nflags : avx512f amx_bf16"))
    few = [number for number in (1, 2, 3, 16, 17) if is_onednn_chosen("expert_forward", number)]
    assert few == [3, 16] and not is_onednn_chosen("expert_input_gradient", 3)
    assert products_in_use().copies_expert_gradient
    assert not choose_products(None, "GenuineIntel avx512f").copies_expert_gradient


def test_the_environment_gives_one_library(fresh, monkeypatch):
    for library in ("blas", "onednn"):
        monkeypatch.setenv(CHOICE_VARIABLE, library)
        use_products(None)
        assert products_in_use() == fixed_choice(library)


def test_what_is_no_choice_is_refused(fresh, monkeypatch):
    monkeypatch.setenv(CHOICE_VARIABLE, "mkl")
    with pytest.raises(ConfigError, match=r"STMOE_PRODUCTS is 'mkl'; expected blas or onednn"):
        products_in_use()
