"""Which library multiplies: given, saved or measured, the same in all processes that start together.

The measurement itself is real; what it finds is the machine's affair.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.layer import products
from moe import ConfigError
from moe.kernels import product_choice
from moe.kernels.product_choice import (
    CHOICE_VARIABLE,
    cache_file,
    copies_expert_gradient,
    fixed_choice,
    is_onednn_chosen,
    products_in_use,
    save_measurement,
    use_products,
)
from moe.kernels.product_measurement import (
    CopyTime,
    LibraryByTokens,
    Measurement,
    ProductTime,
    measure_products,
)
from tests.processes import Command

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has one library"
)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Gives a process that has chosen nothing, and an empty cache."""
    before = products_in_use()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(CHOICE_VARIABLE, raising=False)
    use_products(None)
    yield tmp_path
    use_products(before)


FOUND = Measurement(
    processor="a CPU",
    torch="a release",
    choice=fixed_choice("onednn")._replace(copies_expert_gradient=True),
    times=[ProductTime("expert_input_gradient", "one", blas=2.0, onednn=1.0)],
    copy_time=CopyTime(as_it_lies=2.0, copied=1.0),
)


@pytest.fixture
def measured(monkeypatch):
    """Takes the measurement above for one of this machine; returns a list with an entry for each."""
    calls = []

    def measure():
        calls.append(1)
        return FOUND

    for module in (product_choice, products):
        monkeypatch.setattr(module, "measure_products", measure)
    return calls


@pytest.mark.parametrize("content", [None, '{"processor": 3}'], ids=["no cache", "damaged"])
def test_a_machine_measures_once_and_a_damaged_cache_again(fresh, measured, content):
    assert cache_file().is_relative_to(fresh)
    if content is not None:
        cache_file().parent.mkdir(parents=True)
        cache_file().write_text(content, encoding="utf-8")
    for _ in range(2):  # the second process reads
        use_products(None)
        assert products_in_use() == FOUND.choice
    assert len(measured) == 1


@pytest.mark.slow
def test_a_measurement_is_invisible_and_chooses_the_faster_library_where_it_is_worth_it():
    threads = torch.get_num_threads()
    with FlopCounterMode(display=False) as counter, torch.device("meta"), torch.no_grad():
        measurement = measure_products()
    assert counter.get_total_flops() == 0
    assert torch.get_num_threads() == threads
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == threads

    assert len(measurement.times) == 15
    for entry in measurement.times:
        library = getattr(getattr(measurement.choice, entry.kind), entry.tokens)
        assert (library == "onednn") == (entry.onednn < 0.95 * entry.blas)
        assert entry.blas > 0 and entry.onednn > 0
    copied, as_it_lies = measurement.copy_time.copied, measurement.copy_time.as_it_lies
    assert measurement.choice.copies_expert_gradient == (copied < 0.95 * as_it_lies)
    assert copied > 0 and as_it_lies > 0


def test_a_home_that_cannot_be_written_to_is_no_obstacle(fresh, measured, monkeypatch):
    (fresh / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh / "file"))
    assert products_in_use() == FOUND.choice


def test_the_environment_gives_one_library(fresh, measured, monkeypatch):
    for library in ("blas", "onednn"):
        monkeypatch.setenv(CHOICE_VARIABLE, library)
        use_products(None)
        for num_tokens in (1, 3, 17):
            assert is_onednn_chosen("expert_forward", num_tokens) == (library == "onednn")
    assert not measured


def test_the_environment_gives_a_file_of_the_benchmark(fresh, measured, monkeypatch, capsys):
    file = fresh / "products.json"
    products.run_products(json=file)
    printed = capsys.readouterr().out
    assert "expert input gradient" in printed and str(cache_file()) in printed

    # The file and not the cache decides.
    save_measurement(FOUND._replace(choice=fixed_choice("blas")), cache_file())
    monkeypatch.setenv(CHOICE_VARIABLE, str(file))
    use_products(None)
    assert products_in_use() == FOUND.choice
    assert copies_expert_gradient()


def test_what_is_no_choice_is_refused(fresh, monkeypatch):
    for given in ("mkl", "/nonexistent/products.json"):
        monkeypatch.setenv(CHOICE_VARIABLE, given)
        with pytest.raises(ConfigError, match=r"STMOE_PRODUCTS takes blas, onednn, or a file of"):
            products_in_use()


def test_one_few_and_many_tokens_have_their_own_library(fresh):
    libraries = LibraryByTokens(one="onednn", few="blas", many="onednn")
    use_products(fixed_choice("blas")._replace(weight_gradient=libraries))
    chosen = {number: is_onednn_chosen("weight_gradient", number) for number in (1, 2, 3, 16, 17)}
    assert chosen == {1: True, 2: True, 3: False, 16: False, 17: True}
    assert not is_onednn_chosen("forward", 17)


@pytest.mark.slow
def test_processes_that_start_together_choose_alike(fresh):
    program = fresh / "program.py"
    program.write_text(
        "from moe.kernels.product_choice import products_in_use\n"
        "import json; print(json.dumps(products_in_use()))"
    )
    environment = {"XDG_CACHE_HOME": str(fresh)}
    processes = [Command(str(program), environment=environment) for _ in range(2)]
    printed = {process.finish().stdout for process in processes}
    assert len(printed) == 1 and "forward" not in printed
    kept = json.loads(cache_file().read_text(encoding="utf-8"))
    copies = kept["choice"].pop("copies_expert_gradient")
    libraries = [list(kinds.values()) for kinds in kept["choice"].values()]
    assert json.loads(printed.pop()) == [*libraries, copies]
    assert isinstance(Measurement(**kept), Measurement)
