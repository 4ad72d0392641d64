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
    addresses = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["urls"]
    if "/OWNER/" not in addresses["Source"]:
        config.site_url = addresses["Documentation"]
        config.repo_url = addresses["Source"]
        config.repo_name = "GitHub"
    return config
