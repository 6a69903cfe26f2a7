"""What vllm-check counts and compares, without vLLM: passes as a server counts them, answers, metrics, and a child that is
ended with its children.
"""

import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from dllm.evals.divergence import Divergence
from dllm.evals.vllm_check import QUESTIONS, DrafterResult, _questions, compare, result_table
from dllm.evals.vllm_ours import Accepted, cut_answer, is_tie, our_answers, passes_until
from dllm.evals.vllm_server import Answer, ServerError, VLLMServer, draft_counters, free_port
from tests.speculative import Scripted, greedy_text, hf_target, random_drafter

METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 29.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.796075018931312e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 203.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 18.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 12.0
vllm:num_requests_running{engine="0"} 4.0
"""


def test_counters_are_read_from_metrics_and_summed_over_engines():
    counters = draft_counters(METRICS)
    assert counters == {"num_drafts": 29, "num_draft_tokens": 203, "num_accepted_tokens": 18}
    assert draft_counters(METRICS + METRICS.replace('engine="0"', 'engine="1"'))["num_drafts"] == 58
    with pytest.raises(ValueError, match="metrics must hold vllm:spec_decode_num_accepted_tokens"):
        draft_counters("vllm:num_requests_running 4.0\n")


def test_a_mean_length_counts_the_target_s_own_token():
    assert Accepted(4, 6).length == 2.5 and Accepted(0, 0).length == 1.0
    assert Accepted(1, 2) + Accepted(3, 4) == Accepted(4, 6)


def test_an_answer_ends_with_its_stop_token_or_at_the_limit():
    assert cut_answer([5, 6, 2, 7], {2}, 10) == [5, 6, 2]
    assert cut_answer([5, 6, 2, 7], {2}, 2) == [5, 6]
    assert cut_answer([5, 6], {2}, 9) == [5, 6]


@pytest.mark.parametrize(
    ("length", "expected"), [(1, (0, 0)), (2, (1, 2)), (4, (1, 2)), (5, (2, 2)), (6, (3, 7)), (11, (3, 7))]
)
def test_passes_are_those_that_begin_before_the_answer_is_complete(length, expected):
    # After the prefill's token the passes bring 1 -> 4 -> 5 -> 11 tokens.
    assert passes_until([3, 1, 6], length) == Accepted(*expected)


def test_too_short_a_run_is_named():
    with pytest.raises(ValueError, match="accept_lengths must reach 12 tokens: got 11"):
        passes_until([3, 1, 6], 12)


def test_our_loop_counts_drafts_behind_the_stop_as_a_server_does():
    target = hf_target(max_position_embeddings=128)
    prompt, limit = [3, 1, 7], 12
    text = greedy_text(target, prompt, 40)
    drafter = Scripted(target, [text], wrong=(9, 13))
    new = text[len(prompt) :]
    # Token 0 comes from the prefill; drafts err at text positions 9 and 13: 1, 7, 11, then all seven drafts and one more.
    answers = our_answers(target, drafter, [prompt], 7, limit, set())
    assert answers == [(new[:limit], Accepted(3, 5 + 3 + 7))]
    stop = new[8]
    end = new.index(stop) + 1
    assert our_answers(target, drafter, [prompt], 7, limit, {stop})[0][0] == new[:end]


def test_our_answers_of_a_batch_are_those_of_single_prompts():
    target = hf_target(max_position_embeddings=128)
    asked = [[3, 1, 7], [5], [2, 2, 9, 11, 4]]
    drafter = random_drafter("dfly", target)
    together = our_answers(target, drafter, asked, 5, 10, {new_token(target, asked[0], 4)}, batch_size=2)
    assert together == our_answers(target, drafter, asked, 5, 10, {new_token(target, asked[0], 4)}, batch_size=1)
    assert all(0 < len(answer) <= 10 for answer, _ in together)


def new_token(target, prompt, index):
    """The greedy text's new token number ``index``."""
    return greedy_text(target, prompt, index + 1)[-1]


def test_a_tie_is_a_small_gap_on_either_side():
    assert is_tie(Divergence(0, 3, 1, 2, 5e-5)) and is_tie(Divergence(0, 3, 1, 2, -5e-5))
    assert not is_tie(Divergence(0, 3, 1, 2, 2e-4)) and not is_tie(Divergence(0, 3, 1, None, None))


def answer(ids):
    return Answer([3, 1, 7], ids, "", "stop")


def test_a_drafter_passes_with_the_same_tokens_and_about_our_accepted_length():
    target = hf_target()
    plain = [answer([4, 5]), answer([6])]
    ours = [([4, 5], Accepted(10, 20)), ([8], Accepted(10, 20))]
    result, differences = compare("d", target, plain, plain, Accepted(20, 41), ours)
    assert result == DrafterResult("d", 2, 2, 0, 1, Accepted(20, 41), Accepted(20, 40)) and not differences
    assert result.ok and result.gap == pytest.approx(0.05 / 3)
    assert not compare("d", target, plain, plain, Accepted(20, 42), ours)[0].ok
    assert not compare("d", target, plain, plain, Accepted(0, 0), [([4, 5], Accepted(0, 0))] * 2)[0].ok
    wrong, differences = compare("d", target, plain, [answer([4, 9]), answer([6])], Accepted(20, 40), ours)
    assert not wrong.ok and wrong.same == 1 and [d.place for d in differences] == [1]
    table = result_table([result, wrong])
    assert table.columns[-1]._cells == ["ok", "MISS"]


def test_there_are_sixteen_questions_and_a_file_of_others_is_read(tmp_path):
    assert len(set(QUESTIONS)) == 16
    assert _questions(None, 2)[1] == [{"role": "user", "content": QUESTIONS[1]}]
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": "a"}\n{"turns": ["b", "c"]}\n')
    assert [said[0]["content"] for said in _questions(path, 2)] == ["a", "b"]
    with pytest.raises(ValueError, match="count must be at most 2, the number of prompts: got 3"):
        _questions(path, 3)
    path.write_text('{"answer": "a"}\n')
    with pytest.raises(ValueError, match="prompts must have question"):
        _questions(path, 1)


# The server's process

CHILD = """
import http.server, subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("worker", worker.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = open(sys.argv[2], "rb").read()
        self.send_response(200); self.end_headers(); self.wfile.write(body)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class StandIn(VLLMServer):
    """The same life cycle around a small web server that has a worker of its own."""

    code = CHILD

    @property
    def command(self):
        return [sys.executable, "-c", self.code, str(self.port), str(self.model)]


def is_alive(pid):
    """Whether a process runs; one that has ended and waits for its parent does not."""
    with suppress(OSError):
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:1]
    return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")
def test_a_server_is_ready_inside_and_gone_with_its_workers_after(tmp_path):
    (tmp_path / "metrics").write_text(METRICS)
    with StandIn(tmp_path / "metrics", tmp_path / "log") as server:
        assert server.accepted() == Accepted(29, 18)
        assert server.process is not None
        worker = int((tmp_path / "log").read_text().split()[1])
        assert is_alive(server.process.pid) and is_alive(worker)
        parent = server.process.pid
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and (is_alive(worker) or is_alive(parent)):
        time.sleep(0.05)
    assert not is_alive(parent) and not is_alive(worker)


def test_a_server_that_ends_or_never_gets_ready_is_told_with_its_log(tmp_path):
    class Broken(StandIn):
        code = "print('no such model'); raise SystemExit(3)"

    class Silent(StandIn):
        code = "import time; print('loading', flush=True); time.sleep(600)"

    with (
        pytest.raises(ServerError, match=r"ended with status 3\n(?s:.*)no such model"),
        Broken(tmp_path, tmp_path / "log"),
    ):
        pass
    silent = Silent(tmp_path, tmp_path / "log2", ready_s=2.0)
    with pytest.raises(ServerError, match=r"not ready after 2 s\n(?s:.*)loading"), silent:
        pass
    assert silent.process is None


def test_the_command_names_the_drafter_and_the_port(tmp_path):
    server = VLLMServer(tmp_path / "m", tmp_path / "log", {"method": "dflash", "model": "d"}, max_num_seqs=2)
    server.port = free_port()
    words = server.command
    options = dict(zip(words[3::2], words[4::2], strict=False))
    assert words[1:3] == ["-m", "vllm.entrypoints.openai.api_server"] and options["--port"] == str(server.port)
    assert options["--dtype"] == "float32"
    assert words[-2:] == ["--speculative-config", '{"method": "dflash", "model": "d"}']
    assert "--speculative-config" not in VLLMServer(tmp_path, tmp_path / "log").command
