"""Hooks of MkDocs: pages outside of docs/ become pages of the site, and links between pages show their titles.

Command: mkdocs build --strict        (mkdocs.yml names this file)
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# Pages outside of docs/, and where they are on the site.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "notebooks/README.md": "notebooks.md",
    **{f"notebooks/{path.name}": f"notebooks/{path.stem}.md" for path in sorted((ROOT / "notebooks").glob("*.ipynb"))},
}
_LABEL = re.compile(r"\[([\w./-]+(?:\.md|/))(?=\]\(([^)#\s]+\.md)[)#])")
_LINK = re.compile(r"(\]\(|src=\")(?!\w+:|#)([^)#\"\s]+)((?:#[^)\"\s]*)?[)\"])")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside of docs/, and the files that pages link to."""
    for source, place in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=_render(text) if source.endswith(".ipynb") else text))
    for page in list(files.documentation_pages()):
        for _, target, _ in _LINK.findall(page.content_string):
            path = _path_of(target, place=page.src_uri)
            if _is_plain(path) and f"files/{path}" not in files.src_uris:
                files.append(File.generated(config, f"files/{path}", content=(ROOT / path).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **kwargs: Any) -> str:
    """Rewrite relative links for the site, and links that show the path of a page to show its title."""
    here = posixpath.dirname(page.file.src_uri)
    titles = dict(_titles_of(config.nav))

    def name(link: re.Match[str]) -> str:
        path = _path_of(link[2], place=page.file.src_uri)
        title = titles.get(PAGES.get(path, path.removeprefix("docs/")))
        return f"[{title}" if title else link[0]

    def move(link: re.Match[str]) -> str:
        path = _path_of(link[2], place=page.file.src_uri)
        place = PAGES.get(path) or (f"files/{path}" if _is_plain(path) else path.removeprefix("docs/"))
        return f"{link[1]}{posixpath.relpath(place, here or '.')}{link[3]}"

    return _LINK.sub(move, _LABEL.sub(name, markdown))


def _render(notebook: str) -> str:
    """Return the cells of a notebook as Markdown."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(notebook)["cells"]]
    return "\n\n".join(f"```python\n{text}\n```" if kind == "code" else text for kind, text in cells)


def _titles_of(nav: Any) -> Iterator[tuple[str, str]]:
    """Yield the places of pages and their titles in the navigation."""
    for entry in nav or ():
        for title, place in entry.items():
            if isinstance(place, str):
                yield place, title
            else:
                yield from _titles_of(place)


def _path_of(target: str, *, place: str) -> str:
    """Return the path in the repository of a link's target on a page of the site."""
    source = next((source for source, page in PAGES.items() if page == place), f"docs/{place}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def _is_plain(path: str) -> bool:
    """Return whether a path is a file outside of docs/ that is not a page."""
    return path not in PAGES and not path.startswith("docs/") and (ROOT / path).is_file()
