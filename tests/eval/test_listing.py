"""python -m eval list: every task with where its rows are from and what is said of them."""

from eval.__main__ import main
from eval.task import TASKS


def lines(capsys) -> list[str]:
    main(["list"])
    return capsys.readouterr().out.splitlines()


def test_every_task_has_one_line_below_its_family(capsys):
    printed, family, found = lines(capsys), "", {}
    for line in printed[1 : printed.index("")]:
        if line.startswith("  "):
            found[line.split()[0]] = family
        else:
            family = line
    assert found == {name: TASKS.get(name).family for name in TASKS.names()}


def test_a_line_says_rows_reported_split_prompt_data_and_licence(capsys):
    cells = {
        line.split()[0]: line.split(maxsplit=1)[1]
        for line in lines(capsys)
        if line.startswith("  ")
    }
    for part in (
        "1 ",
        "em, f1",
        "100,730/*10,000/(10,000)",
        "T5",
        "aps/super_glue record",
        "Apache-2.0",
    ):
        assert part in cells["record"]
    for part in ("f1, em", "130,319/*11,873", "rajpurkar/squad_v2 squad_v2", "CC BY-SA 4.0"):
        assert part in cells["squad_v2"]
    assert "16,946/1,000/*1,000  FLAN" in " ".join(cells["anli_r1.flan"].split()).replace(
        " FLAN", "  FLAN"
    )
    assert "this Python installation" in cells["unicode_category"]


def test_columns_are_aligned(capsys):
    printed = lines(capsys)
    start = printed[0].index("data")
    table = [line for line in printed[1 : printed.index("")] if line.startswith("  ")]
    assert all(line[start - 1] == " " != line[start] for line in table)
