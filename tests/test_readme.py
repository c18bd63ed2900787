"""README's promises: every file is on the map, every command and preset it names exists."""

import re
from pathlib import Path

import pytest

from gc_dpr.cli.launch import config_folder
from gc_dpr.cli.main import COMMANDS
from gc_dpr.cli.settings import check_keys

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAP = README.partition("## Code map")[2]


def test_every_module_is_on_the_map():
    names = {path.name for path in (ROOT / "gc_dpr").rglob("*.py")} - {"__init__.py", "__main__.py"}
    assert sorted(name for name in names if name not in MAP) == []


def test_every_file_on_the_map_exists():
    existing = {path.name for path in (ROOT / "gc_dpr").rglob("*.py")}
    existing |= {path.name for path in (ROOT / "scripts").iterdir()}
    existing |= {path.name for path in (ROOT / "docs").iterdir()} | {"README.md"}
    named = set(re.findall(r"\b[\w]+\.(?:py|sh|md)\b", MAP.partition("\n[docs")[0]))
    assert named - existing == set()


def commands_in(text):
    """(command, settings) of every gc-dpr line, continuation lines joined."""
    text = text.replace("\\\n", " ")
    for line in re.findall(r"gc-dpr (\w+ [^\n`|]*)", text) + re.findall(
        r"-m gc_dpr (\w+ [^\n`|]*)", text
    ):
        words = re.findall(r"'[^']*'|\"[^\"]*\"|\S+", line)
        command, *settings = (word.strip("'") for word in words)
        if command in COMMANDS:
            yield command, [word for word in settings if re.match(r"[\w./]+=", word)]


@pytest.mark.parametrize("document", ["README.md", "data/README.md"])
def test_commands_in_documents_are_accepted(document):
    found = list(commands_in((ROOT / document).read_text(encoding="utf-8")))
    for command, settings in found:
        check_keys(command, settings, config_folder())
        for setting in settings:
            group, _, name = setting.partition("=")
            if (config_folder() / group).is_dir():
                assert (config_folder() / group / f"{name}.yaml").is_file(), setting
    if document == "README.md":
        assert {command for command, _ in found} == set(COMMANDS)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target
