"""stmoe eval list: every task with where its rows are from and what is said of them."""

from stmoe import main
from stmoe_eval.task import TASKS


def test_every_task_has_one_line_below_its_family_with_rows_prompt_data_and_licence(capsys):
    main(["eval", "list"])
    printed = capsys.readouterr().out.splitlines()
    start = printed[0].index("data")
    families, cells, family = {}, {}, ""
    for line in printed[1 : printed.index("")]:
        if line.startswith("  "):
            name, content = line.split(maxsplit=1)
            families[name], cells[name] = family, " ".join(content.split())
            assert line[start - 1] == " " != line[start]
        else:
            family = line
    assert families == {name: TASKS.get(name).family for name in TASKS.names()}

    assert cells["record"].startswith("1 ")
    for name, parts in {
        "record": (
            "em, f1",
            "100,730/*10,000/(10,000)",
            "T5",
            "aps/super_glue record",
            "Apache-2.0",
        ),
        "squad_v2": ("f1, em", "130,319/*11,873", "rajpurkar/squad_v2 squad_v2", "CC BY-SA 4.0"),
        "anli_r1.flan": ("16,946/1,000/*1,000 FLAN",),
    }.items():
        for part in parts:
            assert part in cells[name]
