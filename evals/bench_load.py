"""What loading a checkpoint costs the host, and how long a 32-row block step takes, at the shapes of published models.

    python -m dllm.evals.bench_load [--device cuda] [--shapes llada-8b,dream-7b,sdar-4b] [--out FILE]

Two measurements, as JSON. *load*: a random bf16 checkpoint of LLaDA's layout is written in shards to a temporary folder and loaded by
``DiffusionLM.from_pretrained`` in a fresh process; grown_bytes is the high-water mark of its resident memory above where it stood just
before (mapped pages of the files count), to be compared with shard_bytes, plus the weights where they stay on the host. *step*: random
weights made on the device; forward_ms is the median of one forward of the block's rows over a stored prompt, with head and row
statistics; generate_ms is decode_s / nfe of ``generate`` with the dual cache (the full pass of the block's first step included).
Nothing here says anything about quality: the weights are random.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dllm.evals.atomic_write import write_text_atomic
from dllm.families import find_family
from dllm.families.loading import CONFIG_NAME, INDEX_NAME, restore_buffers
from dllm.families.placement import resolve_device
from dllm.kernels.row_stats import row_stats
from dllm.pipeline import DiffusionLM
from dllm.types import Attend

BLOCK, PROMPT, NEW_TOKENS = 32, 512, 64
SHARD_BYTES = 2_000_000_000
REPEATS, WARM_UP = 20, 3
"""Timed and untimed repetitions; 23 block steps of an 8B model take about a second on a data-centre GPU."""


def llada_config(width: int, layers: int, heads: int, mlp: int, vocab: int, positions: int = 4096) -> dict[str, Any]:
    """A config.json of LLaDA's layout."""
    return dict(
        model_type="llada",
        d_model=width,
        n_heads=heads,
        n_kv_heads=heads,
        n_layers=layers,
        mlp_hidden_size=mlp,
        vocab_size=vocab,
        embedding_size=vocab,
        max_sequence_length=positions,
        rope_theta=500000.0,
        weight_tying=False,
        mask_token_id=vocab - 1,
        eos_token_id=vocab - 2,
    )


def qwen_config(model_type: str, sizes: Sequence[int], vocab: int, **extra: Any) -> dict[str, Any]:
    """A config.json of the Qwen-like layouts; sizes: width, layers, heads, key heads, head width, MLP width."""
    width, layers, heads, kv_heads, head_dim, mlp = sizes
    return dict(
        model_type=model_type,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=mlp,
        vocab_size=vocab,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=4096,
        mask_token_id=vocab - 1,
        eos_token_id=vocab - 2,
        tie_word_embeddings=False,
        hidden_act="silu",
        **extra,
    )


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llada-8b": llada_config(4096, 32, 32, 12288, 126464),
    "dream-7b": qwen_config("Dream", (3584, 28, 28, 4, 128, 18944), 152064),
    "sdar-4b": qwen_config("sdar", (2560, 36, 32, 8, 128, 9728), 151936, block_size=BLOCK),
    "tiny-llada": llada_config(64, 2, 4, 96, 256),
    "tiny-dream": qwen_config("Dream", (64, 2, 4, 2, 16, 96), 256),
    "tiny-sdar": qwen_config("sdar", (64, 2, 4, 2, 16, 96), 256, block_size=BLOCK),
}
"""Configs by name; the tiny ones are for trying this file."""


def tensors_of(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the checkpoint's own tensors."""
    family = find_family(config)
    assert family.sources is not None, "a family with a tensor-name map"
    with torch.device("meta"):
        state = family.build(config).state_dict()
    for ours, theirs in family.sources(config).items():
        shape = state[ours].shape
        for name in theirs:
            yield name, (shape[0] // len(theirs), *shape[1:])


def write_checkpoint(
    config: Mapping[str, Any], folder: Path, shard_bytes: int = SHARD_BYTES, device: torch.device | str = "cpu"
) -> int:
    """A random bf16 checkpoint in shards with their index; bytes of the largest shard. One shard is in memory at a time."""
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    size = largest = count = 0

    def flush() -> None:
        nonlocal shard, size, largest, count
        if shard:
            count += 1
            name = f"model-{count:05}.safetensors"
            save_file(shard, folder / name)
            weight_map.update(dict.fromkeys(shard, name))
            largest, shard, size = max(largest, size), {}, 0

    for name, shape in tensors_of(config):
        value = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02)
        if len(shape) == 1:
            value.add_(1)
        if size + value.nbytes > shard_bytes:
            flush()
        shard[name] = value.cpu()
        size += value.nbytes
    flush()
    (folder / CONFIG_NAME).write_text(json.dumps(dict(config)))
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return largest


def load_and_measure(folder: Path, device: str) -> dict[str, Any]:
    """Load a checkpoint in this process, which should do nothing else: grown_bytes, weight_bytes, load_s."""
    # The context of the device and the buffers of the first copy are no part of loading.
    torch.ones(1 << 20, device=device).cpu()
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        raise OSError("bench_load needs Linux: resident memory is read from /proc")
    reset.write_text("5")
    before, start = _memory("VmRSS"), time.perf_counter()
    lm = DiffusionLM.from_pretrained(folder, device=device)
    if lm.device.type == "cuda":
        torch.cuda.synchronize()
    weights = sum(p.numel() * p.element_size() for p in lm.model.parameters())
    seconds = time.perf_counter() - start
    return {"grown_bytes": _memory("VmHWM") - before, "weight_bytes": weights, "load_s": seconds}


def _memory(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def bench_load(shape: str, device: str, shard_bytes: int = SHARD_BYTES) -> dict[str, Any]:
    """Write, then load in a fresh process. Raises RuntimeError with that process's words if it fails."""
    with tempfile.TemporaryDirectory() as name:
        largest = write_checkpoint(SHAPES[shape], Path(name), shard_bytes, device)
        command = [sys.executable, "-m", "dllm.evals.bench_load", "--load", name, "--device", device]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"loading in a process of its own failed: {done.stderr[-2000:]}")
        found = json.loads(done.stdout.splitlines()[-1])
    on_host = 0 if device.startswith("cuda") else found["weight_bytes"]
    fits = found["grown_bytes"] <= on_host + largest
    return {"shape": shape, "device": device, "shard_bytes": largest, **found, "within_one_shard": fits}


def random_lm(shape: str, device: str) -> DiffusionLM:
    """Random bf16 weights (fp32 on a CPU) made on the device."""
    config = SHAPES[shape]
    family = find_family(config)
    home = resolve_device(device)
    with torch.device("meta"):
        module = family.build(config)
    module = module.to(torch.float32 if home.type == "cpu" else torch.bfloat16).to_empty(device=home)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
        torch.nn.init.normal_(parameter, 0, 0.02) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    restore_buffers(module, {"": home})
    return DiffusionLM(module.eval(), family.spec(config), None, config)


@torch.no_grad()
def bench_step(shape: str, device: str, repeats: int = REPEATS, prompt: int = PROMPT) -> dict[str, Any]:
    """Medians of a block step behind a stored prompt."""
    lm = random_lm(shape, device)
    vocab, home = lm.spec.vocab_size, lm.device
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab - 2, (1, prompt), generator=generator).to(home)
    rows = torch.arange(prompt + BLOCK, device=home)[None]
    store = lm.model.new_store(1, prompt + BLOCK)

    def forward(where: Tensor, tokens: Tensor, masked: Tensor, stored: int, write: bool) -> Tensor:
        store.extent = stored
        keys = torch.zeros(1, stored, dtype=torch.int32, device=home)
        attend = Attend.bidirectional(torch.ones_like(masked), keys)
        embeds = lm.model.embed(tokens, masked, lm.spec.mask_token_id)
        keep = torch.full_like(masked, write)
        return lm.model(None, where, store, attend, embeds=embeds, rows=where, write=keep)

    forward(rows[:, :prompt], ids, torch.zeros_like(ids, dtype=torch.bool), 0, True)
    block = torch.zeros(1, BLOCK, dtype=torch.int64, device=home)

    def step() -> None:
        hidden = forward(rows[:, prompt:], block, torch.ones_like(block, dtype=torch.bool), prompt, False)
        row_stats(lm.model.head(hidden))

    times = [_seconds(step, home) for _ in range(WARM_UP + repeats)][WARM_UP:]
    options: dict[str, Any] = {
        "max_new_tokens": NEW_TOKENS, "block_length": BLOCK, "cache": "dual", "threshold": 2.0, "eos_token_id": []
    }  # fmt: skip
    lm.generate(input_ids=ids, **(options | {"max_new_tokens": BLOCK}))
    stats = lm.generate(input_ids=ids, **options).stats
    return {
        "shape": shape,
        "device": str(home),
        "dtype": str(next(lm.model.parameters()).dtype).removeprefix("torch."),
        "rows": BLOCK,
        "stored": prompt,
        "forward_ms": 1e3 * statistics.median(times),
        "forward_ms_min": 1e3 * min(times),
        "generate_ms": 1e3 * (stats.prefill_s + stats.decode_s) / stats.nfe,
        "weight_bytes": sum(p.numel() * p.element_size() for p in lm.model.parameters()),
        "repeats": repeats,
    }


def _seconds(run: Any, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print JSON; returns the exit status, 1 if loading took more than one shard."""
    parser = argparse.ArgumentParser(prog="python -m dllm.evals.bench_load", description="Loading and block steps.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--checkpoint", default="llada-8b", help="shape that is written and loaded; none: skip")
    parser.add_argument("--shapes", default="llada-8b,dream-7b,sdar-4b", help="shapes whose step is timed")
    parser.add_argument("--shard-bytes", type=int, default=SHARD_BYTES)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.load is not None:
        print(json.dumps(load_and_measure(options.load, options.device)))
        return 0
    names = [name for name in options.shapes.split(",") if name]
    unknown = sorted({*names, options.checkpoint} - {*SHAPES, "none"})
    if unknown:
        parser.error(f"shapes must be among {sorted(SHAPES)}: got {unknown}")
    result: dict[str, Any] = {"torch": torch.__version__, "steps": []}
    if options.device.startswith("cuda"):
        result["gpu"] = torch.cuda.get_device_name()

    def save() -> None:
        if options.out is not None:
            write_text_atomic(options.out, json.dumps(result, indent=1) + "\n")

    # The steps first: a run that is cut short has them, and a large checkpoint takes its time to write.
    for name in names:
        result["steps"].append(bench_step(name, options.device, options.repeats))
        save()
        if options.device.startswith("cuda"):
            torch.cuda.empty_cache()
    if options.checkpoint != "none":
        result["load"] = bench_load(options.checkpoint, options.device, options.shard_bytes)
        save()
    print(json.dumps(result, indent=1))
    return 0 if "load" not in result or result["load"]["within_one_shard"] else 1


if __name__ == "__main__":
    sys.exit(main())
