"""Gives each script and notebook of `examples/` a page of the site while it is built.

Tutorials link to the script's file, which GitHub shows; on the site the link leads to the script's
page. A comment `<!-- path of a notebook -->` stands for its cells and outputs. mkdocs calls
`on_files` and `on_page_markdown`: see `hooks` in mkdocs.yml.
"""

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages, which neither the navigation nor the search lists.

    Args:
        files: The files of the site.
        config: The settings of mkdocs.
    """
    for path, content in pages().items():
        files.append(
            File.generated(config, path, content=content, inclusion=InclusionLevel.NOT_IN_NAV)
        )
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead the links to scripts to their pages, of which `docs/` is the root, and show notebooks.

    Args:
        markdown: The text of a page.
    """
    linked = re.sub(r"\]\(\.\./((\.\./)*examples/[\w./]+)\)", r"](\1.md)", markdown)
    return re.sub(r"<!-- (examples/[\w./]+) -->", lambda found: notebook(ROOT / found[1]), linked)


def pages() -> dict[str, str]:
    """The text of each script's page, by its path below `docs/`."""
    scripts = (path for path in ROOT.glob("examples/**/*") if path.suffix in LANGUAGES)
    return {
        f"{name}.md": f"---\nsearch:\n  exclude: true\n---\n\n# {name}\n\n{content(name)}\n"
        for name in (path.relative_to(ROOT).as_posix() for path in sorted(scripts))
    }


LANGUAGES = {".ipynb": None, ".py": "python", ".sbatch": "shell", ".yaml": "yaml"}


def content(name: str) -> str:
    """What stands for a file in its page: a comment for a notebook, a snippet for others."""
    language = LANGUAGES[Path(name).suffix]
    return f'```{language}\n--8<-- "{name}"\n```' if language else f"<!-- {name} -->"


def notebook(path: Path) -> str:
    """The cells of an executed notebook, each with its outputs; without its title."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(part for cell in cells[1:] for part in cell_parts(cell))


def cell_parts(cell: dict[str, Any]) -> list[str]:
    """A cell's text; or its code, and what it printed and drew."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    return [f"```python\n{source}\n```", *map(shown, cell["outputs"])]


def shown(output: dict[str, Any]) -> str:
    """Text, or a picture within the page."""
    data = output.get("data", {})
    if "image/png" in data:
        png = re.sub(r"\s", "", "".join(data["image/png"]))
        return f'<img alt="What the cell draws" src="data:image/png;base64,{png}">'
    return "```text\n" + "".join(output.get("text", data.get("text/plain", ""))).rstrip() + "\n```"
