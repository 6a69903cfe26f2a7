"""Folders and launch lines for vLLM and SGLang; what an engine would run wrongly is refused by name."""

import json
import shlex

import pytest
import torch

from dllm.bridge.engines import check_engine, export_for_engine
from dllm.drafters.drafter import Drafter
from tests.speculative import hf_target, random_drafter


def words(start):
    return shlex.split(start.line)


def test_vllm_gets_a_z_lab_folder_and_its_speculative_config(tmp_path):
    target = hf_target()
    drafter = random_drafter("dflash", target)
    start = export_for_engine(drafter, tmp_path / "my draft", "vllm", target="some/target", num_drafts=5)
    line = words(start)
    assert line[:3] == ["vllm", "serve", "some/target"]
    assert json.loads(line[line.index("--speculative-config") + 1]) == {
        "method": "dflash",
        "model": str(tmp_path / "my draft"),
        "num_speculative_tokens": 5,
    }
    config = json.loads((tmp_path / "my draft" / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["dtype"] == "bfloat16"
    # Where transformers, vLLM and SGLang look for them.
    for place in (config, config["dflash_config"]):
        assert (place["block_size"], place["mask_token_id"], place["target_layer_ids"]) == (8, 39, [0, 2])
    again = Drafter.from_pretrained(tmp_path / "my draft", target, dtype=torch.float32)
    for name, tensor in again.state_dict().items():
        torch.testing.assert_close(tensor, drafter.state_dict()[name], atol=1e-2, rtol=1e-2)


def test_mixed_layers_need_vllm_s_second_runner_and_sglang_is_told_the_window(tmp_path):
    drafter = random_drafter("dflash2", hf_target(), windows=(16, None), causal=(False, False))
    start = export_for_engine(drafter, tmp_path / "v", "vllm", target="t")
    assert words(start)[0] == "VLLM_USE_V2_MODEL_RUNNER=1"
    line = words(export_for_engine(drafter, tmp_path / "s", "sglang", target="t"))
    assert line[:5] == ["python", "-m", "sglang.launch_server", "--model-path", "t"]
    options = dict(zip(line[5::2], line[6::2], strict=True))
    assert options == {
        "--speculative-algorithm": "DFLASH",
        "--speculative-draft-model-path": str(tmp_path / "s"),
        # The anchor counts.
        "--speculative-num-draft-tokens": "8",
        "--speculative-draft-window-size": "16",
    }
    plain = random_drafter("dflash", hf_target())
    start = export_for_engine(plain, tmp_path / "p", "vllm", target="t")
    assert words(start)[0] == "vllm"


@pytest.mark.parametrize(
    ("engine", "changes", "message"),
    [
        ("vllm", dict(input_embedding_scale=2.0), "input_embedding_scale must be 1.0 for vllm"),
        ("vllm", dict(output_multiplier=0.5), "output_multiplier must be 1.0 for vllm"),
        ("vllm", dict(final_logit_softcapping=20.0), "final_logit_softcapping must be None for vllm"),
        ("sglang", dict(input_embedding_scale=2.0), "input_embedding_scale must be 1.0 for sglang"),
        ("sglang", dict(output_multiplier=0.5, final_logit_softcapping=20.0), None),
        ("sglang", dict(draft_vocab_size=20), "draft_vocab_size must be the target's vocabulary for sglang"),
        ("vllm", dict(draft_vocab_size=20), None),
    ],
)
def test_what_an_engine_does_not_read_is_refused(engine, changes, message):
    drafter = random_drafter("dflash", hf_target(), **changes)
    if message is None:
        check_engine(drafter, engine)
        return
    with pytest.raises(ValueError, match=message):
        check_engine(drafter, engine)


def test_a_dfly_an_unknown_engine_and_an_unknown_target_are_named(tmp_path):
    target = hf_target()
    with pytest.raises(ValueError, match="sglang has no method for a dfly"):
        export_for_engine(random_drafter("dfly", target), tmp_path, "sglang", target="t")
    drafter = random_drafter("dflash", target)
    with pytest.raises(ValueError, match="engine must be one of"):
        export_for_engine(drafter, tmp_path, "tgi", target="t")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="target must be given"):
        export_for_engine(drafter, tmp_path, "vllm")
    with pytest.raises(ValueError, match=r"num_drafts must be in \[1, 7\]: got 8"):
        export_for_engine(drafter, tmp_path, "vllm", target="t", num_drafts=8)
    assert not list(tmp_path.iterdir())


def test_the_command_writes_the_folder_and_prints_the_line(tmp_path):
    typer = pytest.importorskip("typer")
    from typer.testing import CliRunner

    from dllm.bridge.engines import command

    target = hf_target()
    target.save_pretrained(tmp_path / "target")
    random_drafter("dflash", target).save_pretrained(tmp_path / "draft")
    app = typer.Typer()
    app.command()(command)
    arguments = [str(tmp_path / "draft"), "--out", str(tmp_path / "out"), "--target", str(tmp_path / "target")]
    result = CliRunner().invoke(app, [*arguments, "--engine", "sglang", "--num-drafts", "3"])
    assert result.exit_code == 0, result.output
    line = result.stdout.strip().splitlines()[-1]
    assert shlex.split(line)[4] == str(tmp_path / "target") and line.endswith("--speculative-num-draft-tokens 4")
    assert (tmp_path / "out" / "model.safetensors").is_file()
