"""A shipped name is opened by what opens its kind, and told apart from the others."""

import pytest

from dllm import DiffusionLM, Drafter, load_target
from dllm.families.loading import CheckpointNotFoundError
from dllm.shipped import ASSETS, is_shipped, shipped_names
from dllm.training.base import load_base


def open_drafter(name):
    # A name that is refused is refused before the target is looked at.
    return Drafter.from_pretrained(name, target=None)


def test_every_folder_of_the_package_is_a_model_or_a_drafter():
    folders = {p.name for p in ASSETS.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert folders == {*shipped_names("diffusion"), *shipped_names("drafter")}
    assert not folders & set(shipped_names("ar"))


@pytest.mark.parametrize(
    ("load", "name", "message"),
    [
        (DiffusionLM.from_pretrained, "smollm2-135m", r"is an AR model, which load_target\('smollm2-135m'\) opens"),
        (DiffusionLM.from_pretrained, "smollm2-135m-dfly", r"is a drafter, which Drafter.from_pretrained\('smollm2-135m-dfly', target"),
        (open_drafter, "smollm2-135m-bd8", r"is a diffusion LM, which DiffusionLM.from_pretrained\('smollm2-135m-bd8'\) opens"),
        (open_drafter, "smollm2-135m", "is an AR model"),
        (load_target, "smollm2-135m-bd8", "of an AR model: 'smollm2-135m-bd8' is a diffusion LM"),
        (load_target, "smollm2-135m-dflash", "is a drafter"),
        (load_base, "smollm2-135m-full", "of an AR model: 'smollm2-135m-full' is a diffusion LM"),
    ],
)  # fmt: skip
def test_a_name_of_another_kind_is_refused_with_what_opens_it(load, name, message):
    with pytest.raises(ValueError, match=message) as raised:
        load(name)
    assert "hub" not in str(raised.value)


@pytest.mark.parametrize(
    ("load", "line"),
    [
        (DiffusionLM.from_pretrained, "shipped models: smollm2-135m-bd8, smollm2-135m-full"),
        (open_drafter, "shipped drafters: smollm2-135m-dflash, smollm2-135m-dfly"),
        (load_target, "shipped AR models: smollm2-135m"),
    ],
)
def test_a_name_that_nobody_has_is_answered_with_the_shipped_ones(load, line):
    with pytest.raises(CheckpointNotFoundError) as raised:
        load("smollm2-153m-none")
    assert str(raised.value).splitlines()[-1] == line


def test_a_folder_goes_before_a_shipped_name(tmp_path, monkeypatch):
    (tmp_path / "smollm2-135m-dfly").mkdir()
    monkeypatch.chdir(tmp_path)
    assert not is_shipped("smollm2-135m-dfly", "drafter")
    assert not is_shipped("smollm2-135m-dfly", "diffusion")
    with pytest.raises(FileNotFoundError, match="config.json is missing"):
        DiffusionLM.from_pretrained("smollm2-135m-dfly")
