"""Loading keeps host memory below the weights and one shard."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dllm.families import find_family
from dllm.model.weights import save_safetensors
from tests.families.golden import GOLDEN

CONFIG = {
    "model_type": "llada", "d_model": 512, "n_heads": 8, "n_layers": 8, "mlp_hidden_size": 1536, "vocab_size": 8192,
    "embedding_size": 8192, "max_sequence_length": 64, "rope_theta": 500000.0, "weight_tying": False,
}  # fmt: skip
SHARD_BYTES = 24_000_000

MEASURE = """
import json, sys
from pathlib import Path
from dllm.families.loading import load_checkpoint

def memory(name):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(name))
    return int(line.split()[1]) * 1024

load_checkpoint(sys.argv[2], device="cpu")  # what torch imports and allocates once is no part of it
Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
before = memory("VmRSS")
module = load_checkpoint(sys.argv[1], device="cpu")[0]
weights = sum(p.numel() * p.element_size() for p in module.parameters())
print(json.dumps({"grown": memory("VmHWM") - before, "weights": weights}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure resident memory")
def test_the_peak_is_below_the_weights_and_one_shard(tmp_path):
    """Resident memory, which counts the pages of mapped files that are still held."""
    family = find_family(CONFIG)
    assert family.sources is not None
    with torch.device("meta"):
        state = family.build(CONFIG).state_dict()
    tensors: dict[str, torch.Tensor] = {}
    for ours, theirs in family.sources(CONFIG).items():
        rows = state[ours].shape[0] // len(theirs)
        tensors |= {name: torch.zeros(rows, *state[ours].shape[1:]) for name in theirs}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    files = save_safetensors(tensors, tmp_path, max_shard_bytes=SHARD_BYTES)
    assert len(files) > 5
    command = [sys.executable, "-c", MEASURE, str(tmp_path), str(GOLDEN / "llada")]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["weights"] > 100_000_000
    assert found["grown"] < found["weights"] + SHARD_BYTES
