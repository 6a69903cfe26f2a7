"""The layout that imports, packaging and other people's packages rely on."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("samplers", "cache", "kernels", "evals")
IGNORED = ("__pycache__", ".pyc", ".egg-info")

# The hooks that pip calls: what they build is what users install, and they need no network.
BUILD_SDIST = "import setuptools.build_meta as b, sys; b.build_sdist(sys.argv[1])"
BUILD_WHEEL = "import setuptools.build_meta as b, sys; b.build_wheel(sys.argv[1])"


def run_python(code: str, *args: str | Path, cwd: Path, path: Path | None = None) -> str:
    """The standard output of `python -c code args`, run in `cwd` with only `path` added to the import path."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def shipped_files() -> set[str]:
    """Every file that an installed package must hold, as a path below the repository root (`dllm/samplers/x.py`)."""
    found = set()
    for folder, _, names in os.walk(ROOT / "dllm", followlinks=True):
        for name in names:
            path = (Path(folder) / name).relative_to(ROOT).as_posix()
            is_data = path.startswith("dllm/assets/") or path.endswith((".html", "py.typed"))
            if (path.endswith(".py") or is_data) and not any(word in path for word in IGNORED):
                found.add(path)
    return found


def copy_tree(target: Path) -> Path:
    """What the build reads, copied with its links as links, so that building leaves nothing in the repository."""
    target.mkdir()
    for folder in ("dllm", *PARTS):
        shutil.copytree(ROOT / folder, target / folder, symlinks=True)
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, target / name)
    return target


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str], Path]:
    """Names in the sdist (without its top folder), names in the wheel built from that sdist, and the wheel."""
    work = tmp_path_factory.mktemp("build")
    tree, sdists, wheels, unpacked = copy_tree(work / "tree"), work / "sdist", work / "wheel", work / "unpacked"
    run_python(BUILD_SDIST, sdists, cwd=tree)
    with tarfile.open(next(sdists.glob("*.tar.gz"))) as archive:
        sdist_names = [m.name.split("/", 1)[1] for m in archive.getmembers() if m.isfile() and "/" in m.name]
        archive.extractall(unpacked, filter="data")
    run_python(BUILD_WHEEL, wheels, cwd=next(unpacked.iterdir()))
    wheel = next(wheels.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        return sdist_names, archive.namelist(), wheel


@pytest.mark.parametrize("part", PARTS)
def test_each_link_is_relative_and_leads_to_its_root_folder(part: str) -> None:
    link = ROOT / "dllm" / part
    assert link.is_symlink(), f"dllm/{part} is not a symbolic link (on Windows: git clone -c core.symlinks=true)"
    assert os.readlink(link) == f"../{part}"  # noqa: PTH115 - Path.readlink would turn the separators
    assert link.resolve() == ROOT / part


@pytest.mark.parametrize("part", PARTS)
def test_root_folders_hold_no_init_and_explain_themselves(part: str) -> None:
    assert not (ROOT / part / "__init__.py").exists()
    assert (ROOT / part / "README.md").is_file()


def test_kernels_imported_in_the_repository_root_is_the_installed_package_not_our_folder(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("__version__ = '99'\n")
    # `python -c` puts the current folder first, before the folder of the other package.
    code = "import sys, kernels; assert sys.path[0] == ''; print(kernels.__version__, kernels.__file__)"
    assert run_python(code, cwd=ROOT, path=tmp_path) == f"99 {tmp_path / 'kernels' / '__init__.py'}"


def test_transformers_does_not_take_our_folder_for_the_kernels_package() -> None:
    code = """
import importlib.metadata
from transformers.utils import is_kernels_available
try:
    importlib.metadata.version("kernels")
except importlib.metadata.PackageNotFoundError:
    assert not is_kernels_available()
"""
    run_python(code, cwd=ROOT)


def test_one_module_is_never_imported_under_two_names() -> None:
    bare = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("dllm", *PARTS, "tests")
        for path in (ROOT / folder).rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if line.split(".")[0].split(" import ")[0].strip()
        in {f"{verb} {p}" for verb in ("import", "from") for p in PARTS}
    ]
    assert bare == [], f"import the path below dllm/ (from dllm.kernels.x import y): {bare}"


def test_wheel_built_from_the_sdist_holds_every_part(built: tuple[list[str], list[str], Path]) -> None:
    _, wheel_names, _ = built
    expected = shipped_files()
    assert expected >= {"dllm/py.typed", "dllm/model/weights.py"}
    assert {name.split("/")[1] for name in expected} >= {part for part in PARTS if any((ROOT / part).glob("*.py"))}
    assert expected - set(wheel_names) == set()


def test_sdist_and_wheel_hold_each_file_once_and_only_below_dllm(built: tuple[list[str], list[str], Path]) -> None:
    sdist_names, wheel_names, _ = built
    for names in (sdist_names, wheel_names):
        assert len(names) == len(set(names))
        tops = {name.split("/")[0] for name in names}
        assert not tops & {*PARTS, "tests"}, tops
        assert not [name for name in names if "__pycache__" in name]
    assert {name.split("/")[0] for name in wheel_names if ".dist-info/" not in name} == {"dllm"}


def test_every_part_can_be_imported_from_the_wheel_away_from_the_repository(
    built: tuple[list[str], list[str], Path], tmp_path: Path
) -> None:
    _, _, wheel = built
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = """
import importlib.util, sys
for part in sys.argv[1:]:
    spec = importlib.util.find_spec(f"dllm.{part}")
    print(list(spec.submodule_search_locations)[0])
"""
    parts = [part for part in PARTS if any((ROOT / part).glob("*.py"))]
    found = run_python(code, *parts, cwd=tmp_path, path=site).splitlines()
    assert found == [str(site / "dllm" / part) for part in parts]
