"""`accelerate launch` with two processes on the CPU: the real command, a tiny model."""

import json
import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from dllm.evals.run_store import RESULT, SAMPLES

ROOT = Path(__file__).parents[2]
COMMAND = """
import sys
sys.path.insert(0, {root!r})
from dllm.pipeline import DiffusionLM
from tests.words import text_lm
DiffusionLM.from_pretrained = classmethod(lambda cls, name, **_: text_lm())
from dllm.cli import app
app()
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed: nothing launches processes")
def test_two_processes_lose_and_repeat_no_sample_and_end_with_the_file_of_one(tmp_path):
    script = tmp_path / "command.py"
    script.write_text(COMMAND.format(root=str(ROOT)))
    lines = [f"the cab {word} had a bad day" for word in "abcdefghi"]
    (tmp_path / "words.txt").write_text("\n".join(lines) + "\n")
    arguments = ["eval", "infill", "--files", str(tmp_path / "words.txt"), "--length", "fixed:3", "--batch-size", "2"]
    arguments += ["--task-option", "unit=line", "--limit", "7", "--replays", "0", "--device", "cpu"]
    arguments += ["--temperature", "1.0"]
    # `--cpu` starts several processes through MPI only; this is the launcher of many GPUs, and nothing here asks for one.
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(tmp_path / "home")}
    for name, start in (("one", [sys.executable]), ("two", launch)):
        done = subprocess.run(
            [*start, str(script), *arguments, "--output", str(tmp_path / name)],
            capture_output=True, text=True, timeout=240, env=environment, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
    one, two = (tmp_path / name / "files_infill@fixed3" for name in ("one", "two"))
    shards = sorted(two.glob("shard-*.jsonl"))
    written = [[json.loads(line)["index"] for line in shard.read_text().splitlines()] for shard in shards]
    # Both processes worked, on every second sample each, and no index was written twice.
    assert written == [[0, 2, 4, 6], [1, 3, 5]]
    assert Counter(i for shard in written for i in shard) == Counter(range(7))
    assert (two / SAMPLES).read_bytes() == (one / SAMPLES).read_bytes()
    assert (two / RESULT).read_bytes() == (one / RESULT).read_bytes()
