"""The files that PyPI and GitHub read are consistent and complete."""

import re
import runpy
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from release import make_dist

import keras_multigpu

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
URLS = PROJECT["project"]["urls"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
}
FORMS = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    if path.stem != "config"
}


def test_the_version_is_the_same_everywhere():
    version = keras_multigpu.__version__
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert newest is not None
    assert (CITATION["version"], newest[1]) == (version, version)


def test_all_addresses_name_the_same_owner():
    """Few files name the repository; others take it from them."""
    files = [ROOT / name for name in make_dist.WITH_ADDRESSES]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    owners = re.findall(r"github(?:usercontent)?\.com/([\w.-]+)/keras_multigpu", text)
    assert set(owners) == {URLS["Source"].split("/")[3]}
    assert (CITATION["repository-code"], CITATION["url"]) == (URLS["Source"], URLS["Documentation"])
    others = [ROOT / "mkdocs.yml", *ROOT.glob(".github/**/*.yml")]
    assert not [path for path in others if URLS["Source"] in path.read_text(encoding="utf-8")]


def test_pages_link_to_the_repository_once_it_has_an_owner():
    hook = runpy.run_path(str(ROOT / "docs" / "project_address.py"))
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    owner = URLS["Source"].split("/")[3]
    assert hook["settings_of"](pyproject.replace(owner, "OWNER")) == {}
    assert hook["settings_of"](pyproject.replace(owner, "somebody")) == {
        "site_url": "https://somebody.github.io/keras_multigpu/",
        "repo_url": "https://github.com/somebody/keras_multigpu",
        "repo_name": "GitHub",
    }


def test_the_readme_on_pypi_has_no_relative_links(tmp_path, monkeypatch):
    """Its pictures are those of this version, and markers for the documentation are gone."""
    pytest.importorskip("hatch_fancy_pypi_readme", reason="a plugin of the build: group `test`")
    from hatchling.build import prepare_metadata_for_build_wheel

    monkeypatch.chdir(ROOT)
    folder = tmp_path / prepare_metadata_for_build_wheel(str(tmp_path))
    metadata = (folder / "METADATA").read_text(encoding="utf-8")
    _, _, readme = metadata.partition("\n\n")
    links = re.findall(r'\]\(([^)\s]+)|\b(?:src|srcset|href)="([^"]+)"', readme)
    addresses = [one or other for one, other in links]
    assert len(addresses) > 20
    assert not [address for address in addresses if not address.startswith("https://")]
    badge = f"{URLS['Source']}/actions/workflows/tests.yml/badge.svg"
    assert badge in addresses
    own = [each for each in addresses if "/keras_multigpu/" in each and each != badge]
    pictures = [address for address in own if re.search(r"\.(png|svg)$", address)]
    assert pictures
    raw = URLS["Source"].replace("github.com", "raw.githubusercontent.com")
    of_version = f"{raw}/v{keras_multigpu.__version__}/"
    for picture in pictures:
        assert picture.startswith(of_version)
        assert (ROOT / picture.removeprefix(of_version)).exists()
    assert "--8<--" not in readme


def test_each_supported_python_is_tested_on_github():
    supported = make_dist.supported_pythons()
    job = WORKFLOWS["tests"]["jobs"]["newest"]
    assert job["strategy"]["matrix"]["python"] == supported
    (setup,) = (
        step["with"]["python-version"]
        for step in WORKFLOWS["release"]["jobs"]["build"]["steps"]
        if "python-version" in step.get("with", {})
    )
    assert sorted(setup.split()) == supported


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflows_have_few_rights_and_a_time_limit(name):
    """They can only read, unless a job asks for more. Actions are pinned to commits."""
    workflow = WORKFLOWS[name]
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 350
        for step in job["steps"]:
            assert "run" in step or re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"])


def test_only_publishing_jobs_get_an_identity():
    jobs = [
        f"{name}/{job}"
        for name, workflow in WORKFLOWS.items()
        for job, settings in workflow["jobs"].items()
        if settings.get("permissions", {}).get("id-token")
    ]
    assert jobs == ["docs/deploy", "release/publish"]


@pytest.mark.parametrize("name", FORMS)
def test_issue_forms_follow_the_schema_of_github(name):
    form = FORMS[name]
    assert set(form) == {"name", "description", "labels", "body"}
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)
    assert any(field["validations"]["required"] for field in fields if "validations" in field)


def clone_of(folder, version, heading, owner):
    """A clone, reduced to the files that decide whether it can be released."""
    (folder / "keras_multigpu").mkdir()
    (folder / "keras_multigpu" / "__init__.py").write_text(f'__version__ = "{version}"\n')
    (folder / "CHANGELOG.md").write_text(f"# Changelog\n\n{heading}\n")
    (folder / "examples").mkdir()
    for name in make_dist.WITH_ADDRESSES:
        (folder / name).write_text(f"https://github.com/{owner}/keras_multigpu\n")
    return folder


def test_a_finished_version_can_be_released(tmp_path):
    clone = clone_of(tmp_path, "0.3.0", "## 0.3.0 (2031-02-03)", "somebody")
    assert make_dist.what_forbids("v0.3.0", clone) == []


def test_an_unfinished_version_cannot_be_released(tmp_path):
    clone = clone_of(tmp_path, "0.3.0", "## 0.3.0 (unreleased)", "OWNER")
    assert make_dist.what_forbids("v0.4.0", clone) == [
        "v0.4.0 is not v and the __version__ of keras_multigpu/__init__.py.",
        "CHANGELOG.md has no heading of v0.4.0 with a date.",
        *(
            f"{name} still names OWNER where the owner of the repository belongs."
            for name in make_dist.WITH_ADDRESSES
        ),
    ]
    assert make_dist.what_forbids("v0.3.0", clone)[0].startswith("CHANGELOG.md")


def test_a_python_is_found_only_if_it_is_installed():
    version = "{}.{}".format(*sys.version_info)
    assert make_dist.python_of(version)
    assert make_dist.python_of("9.9") is None


def test_missing_and_unexpected_files_fail_the_build(capsys):
    make_dist.same_files("the wheel", {"a.py"}, {"a.py"})
    with pytest.raises(make_dist.Failed):
        make_dist.same_files("the wheel", {"a.py", "notes.txt"}, {"a.py", "py.typed"})
    said = capsys.readouterr().out
    assert "Not in the wheel: ['py.typed']" in said
    assert "git does not track it: ['notes.txt']" in said
