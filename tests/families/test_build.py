"""T14, T03, T15: every family builds without remote code or flash-attn, obeys the mask, and holds in half precision."""

import builtins
import json
import shutil
import sys

import pytest
import torch

from dllm.families import families, find_family
from dllm.families.full_forward import raw_logits
from dllm.pipeline import DiffusionLM
from tests.families.golden import FOLDERS, GOLDEN, golden_lm

FAMILY_NAMES = {"llada2_moe": "llada2"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_family_is_recognised_by_its_config(folder):
    config = json.loads((GOLDEN / folder / "config.json").read_text())
    assert find_family(config).name == FAMILY_NAMES.get(folder, folder)
    assert sum(family.matches(config) for family in families().values()) == 1


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_family_builds_from_its_config_alone_without_flash_attention(folder, monkeypatch):
    for name in ("flash_attn", "flash_attn_2_cuda"):
        monkeypatch.setitem(sys.modules, name, None)
    config = json.loads((GOLDEN / folder / "config.json").read_text())
    family = find_family(config)
    torch.manual_seed(0)
    module = family.build(config).eval()
    spec = family.spec(config)
    logits = DiffusionLM(module, spec).forward(torch.randint(0, spec.vocab_size, (2, 20)))
    assert logits.shape == (2, 20, spec.vocab_size)
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("folder", FOLDERS)
def test_code_in_a_checkpoint_folder_is_never_run(folder, tmp_path, monkeypatch):
    shutil.copytree(GOLDEN / folder, tmp_path / folder)
    config = json.loads((tmp_path / folder / "config.json").read_text())
    mapped = {
        value.split(".")[0] for value in config.get("auto_map", {"AutoModel": "modeling_gemma_remote.Model"}).values()
    }
    for name in mapped:
        (tmp_path / folder / f"{name}.py").write_text("import dllm\ndllm.remote_code_ran = True\n")
    real = builtins.__import__

    def guarded(name, *args, **kwargs):
        assert name.split(".")[0] not in mapped, f"remote module {name} was imported"
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", guarded)
    lm = DiffusionLM.from_pretrained(tmp_path / folder, device="cpu")
    lm.forward(torch.arange(1, 20)[None])
    assert "remote_code_ran" not in vars(sys.modules["dllm"])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("folder", FOLDERS)
def test_padding_is_what_the_mask_says_even_where_the_pad_id_is_a_real_token(folder, side):
    """Pad id == eos id, and a real eos inside the prompt: a padded row equals its single run."""
    lm = golden_lm(folder)
    eos = lm.spec.eos_token_ids[0] if lm.spec.eos_token_ids else 1
    generator = torch.Generator().manual_seed(3)
    lengths = (23, 18)
    rows = [torch.randint(2, lm.spec.vocab_size - 1, (n,), generator=generator) for n in lengths]
    for row in rows:
        row[3] = row[-1] = eos
    width = max(lengths)
    ids, mask = torch.full((2, width), eos), torch.zeros(2, width, dtype=torch.int64)
    for b, row in enumerate(rows):
        at = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[b, at], mask[b, at] = row, 1
    together = lm.forward(ids, mask)
    for b, row in enumerate(rows):
        alone = lm.forward(row[None])[0]
        torch.testing.assert_close(together[b][mask[b].bool()], alone, atol=1e-4, rtol=1e-4)
    # The tokens at padding change nothing.
    changed = lm.forward(torch.where(mask.bool(), ids, 2), mask)
    assert torch.equal(changed[mask.bool()], together[mask.bool()])


@torch.no_grad()
def test_masked_positions_take_the_masks_input_row_whatever_their_id_says():
    lm = golden_lm("llada")
    assert lm.spec.mask_token_id is not None
    ids = torch.arange(1, 11)[None]
    masked = torch.zeros_like(ids, dtype=torch.bool)
    masked[0, 4:7] = True
    literal = ids.masked_fill(masked, lm.spec.mask_token_id)
    assert torch.equal(raw_logits(lm.model, lm.spec, ids, masked=masked), raw_logits(lm.model, lm.spec, literal))
    lm.model.mask_embedding = torch.nn.Parameter(torch.randn(64))
    own = raw_logits(lm.model, lm.spec, literal, masked=masked)
    assert not torch.allclose(own, raw_logits(lm.model, lm.spec, literal))
    with pytest.raises(ValueError, match="masked must have the shape of input_ids"):
        raw_logits(lm.model, lm.spec, ids, masked=masked[:, 1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("folder", FOLDERS)
def test_half_precision_runs_and_stays_near_fp32(folder, dtype):
    """Parity is judged in fp32; here the same weights in half precision keep the law up to rounding."""
    generator = torch.Generator().manual_seed(5)
    full, half = golden_lm(folder), golden_lm(folder, dtype=dtype)
    assert half.model.dtype == dtype
    ids = torch.randint(0, full.spec.vocab_size, (2, 20), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    want, got = (lm.forward(ids, mask)[mask.bool()] for lm in (full, half))
    # Measured: at most 0.0032 (fp16) and 0.024 (bf16).
    bound = 0.01 if dtype == torch.float16 else 0.05
    assert (got.float() - want).norm() / want.norm() < bound
    margin = want.topk(2).values.diff().abs()[:, 0]
    clear = margin > 0.5
    assert clear.float().mean() > 0.5
    agree = (got.argmax(-1) == want.argmax(-1))[clear].float().mean()
    assert agree > 0.97


@pytest.mark.parametrize(
    ("ids", "mask", "error", "match"),
    [
        (torch.zeros(1, 4), None, TypeError, "integers"),
        (torch.zeros(4, dtype=torch.int64), None, ValueError, r"\[B, L\]"),
        (torch.full((1, 4), 10_000), None, ValueError, "input_ids must lie"),
        (torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 5), ValueError, "attention_mask must have the shape"),
        (torch.zeros(2, 3, dtype=torch.int64), torch.tensor([[1, 1, 1], [0, 0, 0]]), ValueError, "empty row"),
    ],
)
def test_a_wrong_forward_input_is_named(ids, mask, error, match):
    with pytest.raises(error, match=match):
        golden_lm("mdlm").forward(ids, mask)
