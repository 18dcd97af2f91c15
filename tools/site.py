# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs.yml: pages that are made of files outside docs/, and links to such files.

README.md becomes the home page, the changelog and its neighbours pages, include/fusedmoe.h the page of the C API. A link to any other file
of the repository becomes its name: the site has no copy of it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
HEADER, C_API = "include/fusedmoe.h", "c-api.md"


def escaped(line: str) -> str:
    return re.sub(r"([\\*_\[\]`])", r"\\\1", line).replace("<", "&lt;")


def comment_text(comment: str) -> str:
    """A comment as Markdown: paragraphs and lists, and what else is indented (formulas, tables) as it stands."""
    lines = [re.sub(r"^ ?\* ?", "", line) for line in re.sub(r"^/\*-*|\*/$", "", comment.strip()).strip("\n").splitlines()]
    out, kind = [], "text"
    for line in lines:
        was = kind
        if line.startswith("  - ") or (was == "list" and line.startswith("    ")):
            kind = "list"
        else:
            kind = "code" if line.startswith("  ") and line.strip() else "text"
        if kind != was:
            out += ["```"] * (was == "code") + [""] + ["```text"] * (kind == "code")
        out.append(line if kind == "code" else escaped(line[2:] if kind == "list" else line.strip()))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out + ["```"] * (kind == "code"))).strip()


def c_api() -> str:
    """The header, a heading at each of its section comments."""
    text = (ROOT / HEADER).read_text()
    top, _, rest = text.partition("*/")
    parts = ["# C API", "", comment_text(top.split("\n", 2)[2]), ""]
    # "/* ---- Title ---- */" opens a section, with a text or without; "/* -- name: what it does ... */" an operation in it.
    body = rest.partition('extern "C" {')[2].partition("#endif\n")[2].rpartition("#ifdef __cplusplus")[0]
    for piece in re.split(r"^(?=/\* --(?:--)? )", body, flags=re.M):
        section = re.match(r"/\* ---- (.*?) -+ \*(?:/|\n(.*?)\*/)", piece, re.S)
        found = section or re.match(r"/\* -- ([^:.]*)[:.](.*?)\*/", piece, re.S)
        if found:
            parts += [f"{'##' if section else '###'} {escaped(found[1])}", "", comment_text(" * " + (found[2] or "").strip(" *")), ""]
            piece = piece[found.end() :]
        code = piece.strip("\n")
        parts += ["```c", code, "```", ""] if code.strip() else []
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts))


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for source, name in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    files.append(File.generated(config, C_API, content=c_api()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links as they stand in the repository to links of the site."""
    here = {v: k for k, v in PAGES.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def link(m: re.Match[str]) -> str:
        text, target, anchor = m[1], m[2], m[3] or ""
        if re.match(r"[a-z]+:", target) or not target:
            return m[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
        name = PAGES.get(path) or (C_API if path == HEADER else path[5:] if path.startswith("docs/") else None)
        if name is None:
            return text.strip("![]") if "`" in text else f"`{text.strip('![]')}`"
        return f"{text}({posixpath.relpath(name, posixpath.dirname(page.file.src_uri) or '.')}{anchor})"

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.S | re.M)
    return "".join(p if p.startswith("```") else re.sub(r"(!?\[[^\]]*\])\(([^)#\s]*)(#[^)\s]*)?\)", link, p) for p in parts)
