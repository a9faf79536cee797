"""The parts of an HTML page that stands alone: nothing in it is loaded from elsewhere."""

from collections.abc import Sequence
from html import escape

# By which a page of this library is told from other HTML files.
GENERATOR = '<meta name="generator" content="stmoe inspect_router">'

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #fdfdfc; --line: #d8d8d4; --soft: #5b5b57; --bar: #cfe3f3; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e4; --paper: #1a1a1c; --line: #3a3a3d; --soft: #a5a5a0; --bar: #234a66; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 64rem; margin: 0 auto; padding: 1rem; }
h1 { line-height: 1.2; overflow-wrap: anywhere; } h2 { margin-top: 2.2rem; border-bottom: 1px solid var(--line); }
p.read { color: var(--soft); max-width: 48rem; } .scroll { overflow-x: auto; } code { font-size: .92em; }
table { border-collapse: collapse; margin: .8rem 0; } th, td { text-align: left; padding: .25rem .9rem .25rem 0;
       border-bottom: 1px solid var(--line); vertical-align: top; }
th.name { white-space: nowrap; } td code, summary, li { overflow-wrap: anywhere; } thead th { white-space: nowrap; }
figure { margin: .8rem 0; background: #fff; border-radius: 6px; padding: .4rem; }
figure svg { width: 100%; height: auto; display: block; } pre { overflow-x: auto; font-size: .85em; }
.cards { display: flex; flex-wrap: wrap; gap: 1rem; } .card { border: 1px solid var(--line); border-radius: 6px;
       padding: .6rem 1rem; flex: 1 1 16rem; } .card b { font-size: 1.5rem; display: block; }
.token { display: inline-block; margin: 0 .5rem .3rem 0; padding: 0 .35rem; border: 1px solid var(--line);
       border-radius: 4px; white-space: nowrap; } .token small { color: var(--soft); }
.token { background: linear-gradient(var(--bar), var(--bar)) no-repeat left / var(--share, 0%) 100%; }
"""


def page(title: str, body: str) -> str:
    """Returns a whole page; `title` is text, `body` HTML."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{GENERATOR}<title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def section(title: str, body: str) -> str:
    """Returns a section of HTML with its heading, a text."""
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def heading(text: str) -> str:
    """Returns a heading inside a section."""
    return f"<h3>{escape(text)}</h3>"


def paragraph(text: str) -> str:
    """Returns a paragraph of text: what was measured."""
    return f"<p>{escape(text)}</p>"


def legend(text: str) -> str:
    """Returns a paragraph of text: how to read what follows."""
    return f'<p class="read">{escape(text)}</p>'


def listing(sentences: Sequence[str]) -> str:
    """Returns a list of texts; nothing for none."""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<ul>{items}</ul>" if items else ""


def figure(svg: str) -> str:
    """Returns a figure."""
    return f"<figure>{svg}</figure>"


def cards(contents: Sequence[tuple[str, str]]) -> str:
    """Returns boxes, each of a large text and a small one below it; nothing for none."""
    boxes = "".join(
        f'<div class="card"><b>{escape(large)}</b>{escape(small)}</div>'
        for large, small in contents
    )
    return f'<div class="cards">{boxes}</div>' if boxes else ""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table; its header is text, its cells are HTML."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def facts(rows: Sequence[tuple[str, str]]) -> str:
    """Returns a table of names and what they stand for; names are text, the rest is HTML."""
    body = "".join(
        f'<tr><th class="name">{escape(name)}</th><td>{cell}</td></tr>' for name, cell in rows
    )
    return f'<div class="scroll"><table><tbody>{body}</tbody></table></div>'


def fold(summary: str, text: str) -> str:
    """Returns a text that opens on a click, as it is."""
    return f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>"


def token(name: str, words: str, tooltip: str, share: float | None = None) -> str:
    """Returns a token with a few words beside it.

    Args:
        name: The token.
        words: Of the numbers beside it.
        tooltip: The same in a sentence.
        share: Part of the box that is filled, 0 to 1; None for none.
    """
    style = "" if share is None else f' style="--share:{100 * share:.0f}%"'
    content = f"<code>{escape(name)}</code> <small>{escape(words)}</small>"
    return f'<span class="token"{style} title="{escape(tooltip)}">{content}</span>'
