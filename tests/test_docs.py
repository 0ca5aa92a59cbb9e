"""The documents tell the truth: commands parse or run, code runs, names and links exist, CI does what README says."""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import typer

from colibri_offload.cli.app import app
from colibri_offload.cli.main import _with_command, main
from colibri_offload.convert.quants import QUANTS
from colibri_offload.jit.formats import FORMATS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/structure.md", "bench/RESULTS.md")
TEST_COMMAND = 'pip install -e ".[test]" && pytest'
COMMANDS: dict[str, Any] = vars(typer.main.get_command(app))["commands"]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def colibri_lines() -> list[list[str]]:
    """The arguments of every `colibri …` in README's shell blocks."""
    lines = [line for block in blocks(README, "sh") for line in block.splitlines()]
    parts = [part.strip() for line in lines for part in line.split("&&")]
    return [shlex.split(part, comments=True)[1:] for part in parts if part.startswith("colibri ")]


def uses_demo(arguments: list[str]) -> bool:
    return "demo" in arguments


def ids(arguments: list[str]) -> str:
    return " ".join(arguments)


def test_readme_has_the_commands_that_are_tested_here():
    names = {_with_command(arguments)[0] for arguments in colibri_lines()}
    assert names == set(COMMANDS)
    assert len(blocks(README, "python")) == 1


def test_the_second_set_up_line_is_the_test_command():
    lines = [line for block in blocks(README, "sh") for line in block.splitlines()]
    assert lines[1] == TEST_COMMAND


def test_ci_runs_readmes_test_command():
    script = (ROOT / ".ci" / "run").read_text()
    assert f"step '{TEST_COMMAND}'" in script.splitlines()


@pytest.mark.parametrize("arguments", colibri_lines(), ids=ids)
def test_readme_command_parses(arguments: list[str]):
    name, *rest = _with_command(arguments)
    COMMANDS[name].make_context(name, rest)


@pytest.mark.parametrize("arguments", [a for a in colibri_lines() if uses_demo(a)], ids=ids)
def test_readme_command_on_the_demo_runs(arguments: list[str], capfd: pytest.CaptureFixture[str]):
    assert main(arguments) == 0
    assert capfd.readouterr().out.strip()


@pytest.mark.parametrize("code", blocks(README, "python"))
def test_readme_code_runs(code: str):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "4096)" in done.stdout, "the shape of the logits"


def test_flags_named_in_documents_exist():
    known = {flag for command in COMMANDS.values() for p in command.params for flag in (*p.opts, *p.secondary_opts)}
    named = set(re.findall(r"`(--[a-z0-9-]+)", README))
    assert len(named) > 10
    assert named <= known


def test_readme_lists_every_format_and_quant():
    of_gguf = set(gguf.GGMLQuantizationType.__members__)
    for name in (*(f for f in FORMATS if f in of_gguf), *QUANTS):
        assert re.search(rf"(?<![\w]){name}(?![\w])", README), name


def test_commands_called_missing_are_missing():
    (missing,) = re.findall(r"^- \*\*HTTP server\*\*, and (.*)\.$", README, re.MULTILINE)
    assert not set(re.findall(r"`(\w+)`", missing)) & set(COMMANDS)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str):
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#][^)]*)\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target.split("#")[0]).exists(), target


def test_modules_named_in_the_structure_exist():
    for section in re.split(r"^## ", (ROOT / "docs" / "structure.md").read_text(), flags=re.MULTILINE)[1:]:
        title, body = section.split("\n", 1)
        folder = ROOT / re.findall(r"`([\w/]+)/`", title)[0]
        names = re.findall(r"^- (.*?):", body, re.MULTILINE)
        for name in re.findall(r"`([\w/.]+)`", " ".join(names)):
            assert (folder / name).exists() or (ROOT / name).exists(), name


def test_every_package_is_in_the_structure():
    text = (ROOT / "docs" / "structure.md").read_text()
    for top in ("colibri_offload", "jit", "storage", "scheduler"):
        for package in (ROOT / top).glob("*/__init__.py"):
            assert f"`{package.parent.name}/`" in text, package.parent


def fake_python(folder: Path, pytest_status: int) -> Path:
    """An interpreter whose venvs hold programs that only say what they were called with."""
    script = folder / "python"
    script.write_text(f"""#!/bin/sh
mkdir -p "$3/bin"
for name in pip pytest ruff mypy; do
  status=0; [ $name = pytest ] && status={pytest_status}
  printf '#!/bin/sh\\necho "called: %s $*"\\nexit %s\\n' $name $status > "$3/bin/$name"
  chmod +x "$3/bin/$name"
done
""")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


@pytest.mark.parametrize("status", [0, 3])
def test_ci_passes_the_exit_status_on(tmp_path: Path, status: int):
    environment = {**os.environ, "PYTHON": str(fake_python(tmp_path, status)), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [ROOT / ".ci" / "run"], env=environment, stdin=subprocess.PIPE, capture_output=True, text=True, timeout=60
    )
    called = [line.removeprefix("called: ").split()[0] for line in done.stdout.splitlines() if "called: " in line]
    assert done.returncode == status, done.stderr
    assert called == (["pip", "pytest"] if status else ["pip", "pytest", "ruff", "pip", "mypy"])
    assert [p.name for p in tmp_path.iterdir()] == ["python"], "the environment is left behind"
