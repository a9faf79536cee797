"""Processes of tests start with the library imported, whatever ran before them."""

import pytest

from tests.processes import IMPORTED, run_program


@pytest.mark.slow
def test_the_server_has_imported_all_that_takes_long(tmp_path):
    ended = run_program(tmp_path, "import sys\nprint(*sys.modules)")
    assert set(IMPORTED) <= set(ended.stdout.split())
