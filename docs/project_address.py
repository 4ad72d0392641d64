"""Links pages to the repository of pyproject.toml, once a maintainer has filled it in there."""

import tomllib
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the addresses of the site and of the repository.

    Args:
        config: The settings of mkdocs.
    """
    config.update(settings_of(PYPROJECT.read_text(encoding="utf-8")))
    return config


def settings_of(pyproject: str) -> dict[str, str]:
    """What mkdocs has to know of the addresses; nothing while they have no owner."""
    addresses = tomllib.loads(pyproject)["project"]["urls"]
    if "/OWNER/" in addresses["Source"]:
        return {}
    return {
        "site_url": addresses["Documentation"],
        "repo_url": addresses["Source"],
        "repo_name": "GitHub",
    }
