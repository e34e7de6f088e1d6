"""A report as one HTML file that needs nothing else, and as Markdown with its pictures beside it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from string import Template

from benchmarks.report.blocks import Section, html, markdown, plain

PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
:root { --text: #1b1b1b; --soft: #5c5c5c; --page: #ffffff; --line: #d8d8d8; --head: #f4f4f4; --link: #00558c;
  --green: #00694b; --yellow: #7a5200; --red: #a93c00; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e6e6; --soft: #a8a8a8; --page: #16181b; --line: #3a3d42; --head: #212429; --link: #7cc4f0;
    --green: #4fcba5; --yellow: #f0bb4a; --red: #ff8f57; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; color: var(--text); background: var(--page);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; padding-top: .75rem; border-top: 1px solid var(--line); }
a { color: var(--link); }
nav a { margin-right: 1rem; white-space: nowrap; }
li { margin: .2rem 0; }
.scroll { overflow-x: auto; margin: 1rem 0; }
figure img { display: block; width: 100%; min-width: 36rem; height: auto; padding: .25rem;
  background: #ffffff; border-radius: 4px; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .25rem 0; }
th, td { padding: .25rem .6rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line);
  overflow-wrap: normal; }
th { background: var(--head); vertical-align: bottom; }
td { white-space: nowrap; }
td:last-child { white-space: normal; }
td.long:last-child { min-width: 12rem; }
.number { text-align: right; }
td.number:last-child { white-space: nowrap; }
.green { color: var(--green); } .yellow { color: var(--yellow); } .red { color: var(--red); font-weight: 700; }
.note, .caption, footer { color: var(--soft); font-size: .85em; }
.warning { border-left: 4px solid var(--yellow); padding: .25rem .75rem; background: var(--head); }
summary { cursor: pointer; padding: .25rem 0; }
@media print {
  :root { --text: #000000; --soft: #444444; --page: #ffffff; --line: #bbbbbb; --head: #f0f0f0; }
  body { max-width: none; padding: 0; font-size: 9.5pt; }
  nav { display: none; }
  .scroll { overflow: visible; }
  figure { break-inside: avoid; }
  figure img { min-width: 0; }
  table { font-size: 7pt; } td { white-space: normal; } tr { break-inside: avoid; }
  h2, summary { break-after: avoid; }
  details::details-content { content-visibility: visible; display: block; height: auto; } }
</style>
</head>
<body>
<header>
<h1>$title</h1>
$summary
<nav aria-label="Sections">$links</nav>
</header>
<main>
$sections
</main>
<footer><p>$foot</p></footer>
</body>
</html>
""")


def page(title: str, first: Section, sections: Sequence[Section], foot: str) -> str:
    """The whole report. first: what stands above all sections."""
    return PAGE.substitute(
        title=escape(title),
        summary="\n".join(map(html, first.blocks)),
        links="\n".join(f'<a href="#{escape(one.key)}">{escape(one.title)}</a>' for one in sections),
        sections="\n".join(map(_chapter, sections)),
        foot=escape(foot),
    )


def _chapter(one: Section) -> str:
    inside = "\n".join(map(html, one.blocks))
    caption = f'<p class="caption">{escape(one.caption)}</p>' if one.caption else ""
    return f'<section id="{escape(one.key)}">\n<h2>{escape(one.title)}</h2>\n{caption}\n{inside}\n</section>'


def text(title: str, first: Section, sections: Sequence[Section], foot: str) -> str:
    """The same as Markdown; its pictures are in pictures/ beside it."""
    parts = [f"# {plain(title)}", *map(markdown, first.blocks)]
    for one in sections:
        parts += [f"## {plain(one.title)}", *([plain(one.caption)] if one.caption else []), *map(markdown, one.blocks)]
    return "\n\n".join([*parts, plain(foot)]) + "\n"
