"""Gives each script of `examples/` a page of the site while the documentation is built.

Tutorials link to the script's file, which GitHub shows; on the site the link leads to the script's
page. mkdocs calls `on_files` and `on_page_markdown`: see `hooks` in mkdocs.yml.
"""

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
    """Lead the links to scripts to their pages, of which `docs/` is the root.

    Args:
        markdown: The text of a page.
    """
    return re.sub(r"\]\(\.\./((\.\./)*examples/[\w./]+)\)", r"](\1.md)", markdown)


def pages() -> dict[str, str]:
    """The text of each script's page, by its path below `docs/`."""
    scripts = (path for path in ROOT.glob("examples/**/*") if path.suffix in LANGUAGES)
    return {
        f"{name}.md": (
            f"---\nsearch:\n  exclude: true\n---\n\n# {name}\n\n"
            f'```{LANGUAGES[Path(name).suffix]}\n--8<-- "{name}"\n```\n'
        )
        for name in (path.relative_to(ROOT).as_posix() for path in sorted(scripts))
    }


LANGUAGES = {".py": "python", ".sbatch": "shell", ".yaml": "yaml"}
