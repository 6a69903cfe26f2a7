"""Guides with another tokenizer: the same bytes in tokens of its own, across multi-byte and multi-token borders."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch

from dllm import ARGuide
from dllm.byte_vocabulary import ByteVocabulary
from dllm.hooks_foreign import ForeignGuideHook
from dllm.samplers.guided import Guided
from dllm.types import Attend
from tests.tiny import EOS, VOCAB, padded, prompt, tiny_decoder, tiny_lm, tokens

ALPHABET = [b"a", b"b", b" ", b"\xc3", b"\xa9", b"\xe2", b"\x82", b"\xac"]


def vocabulary(seed: int) -> ByteVocabulary:
    """Ids 3 to 10 are single bytes, the others random strings of up to four that cut characters anywhere."""
    chance = random.Random(seed)
    pieces: list[bytes | None] = [None] * VOCAB
    pieces[3:11] = ALPHABET
    for token in range(11, 62):
        pieces[token] = b"".join(chance.choice(ALPHABET) for _ in range(chance.randint(2, 4)))
    return ByteVocabulary(pieces, (EOS,), {"<eos>": EOS})


OWN, OTHER = vocabulary(1), vocabulary(2)


class Guide:
    """An ``ARGuide`` that knows the bytes of a diffusion model without tokenizer."""

    def __init__(self, kind: str, seed: int = 1, **rule: Any) -> None:
        self.inner = ARGuide(tiny_decoder(seed), (EOS,), None, Guided(**rule), kind, OTHER)
        self.model, self.rule = self.inner.model, self.inner.rule

    def start(self, loop, tokenizer=None):
        return self.inner.start(loop, byte_vocabulary=OWN)


def guide_greedy(model, ids, num_bytes) -> tuple[bytes, bool]:
    """The guide alone in its own tokens: bytes, at least as many as asked for, or its whole text if it stops."""
    ids, data = OTHER.encode_prompt(ids, OWN), b""
    barred = torch.tensor([p is None and t != EOS for t, p in enumerate(OTHER.pieces)])
    while len(data) <= num_bytes:
        at = torch.arange(len(ids))[None]
        logits = model.head(model(torch.tensor([ids]), at, None, Attend.causal(at))[0, -1]).clone()
        logits[barred] = -torch.inf
        token = int(logits.argmax())
        if token == EOS:
            return data, True
        ids.append(token)
        data += OTHER.pieces[token] or b""
    return data, False


@pytest.mark.parametrize("kind", ["text", "intersection"])
@pytest.mark.parametrize("seed", [1, 5])
def test_the_exact_rule_writes_the_bytes_of_the_guides_own_greedy_text(kind, seed):
    lm = tiny_lm()
    for length in (1, 3, 8):
        guide = Guide(kind, seed, accept="exact", on_reject="ar")
        out = lm.generate(input_ids=[prompt(length)], max_new_tokens=21, guide=guide)
        found = OWN.bytes_of(tokens(out))
        expected, stops = guide_greedy(guide.model, prompt(length), len(found))
        if out.finish_reasons == ["stop"]:
            assert stops
            assert found == expected
        else:
            assert len(tokens(out)) == 21
            assert expected.startswith(found)


@pytest.mark.parametrize("kind", ["text", "intersection"])
@pytest.mark.parametrize("accept", ["exact", "topk", "dynamic_threshold", "original", "always", "never"])
def test_the_diffusion_models_own_tokens_are_all_that_is_written_with_on_reject_dlm(kind, accept):
    lm = tiny_lm("bidirectional", eos_token_ids=(EOS,))
    guide = Guide(kind, accept=accept)
    out = lm.generate(input_ids=[prompt(5)], max_new_tokens=20, guide=guide, output_history=True)
    assert out.history is not None
    for frame in out.history[0]:
        new = [i for i, is_new in enumerate(frame.new) if is_new]
        assert [frame.token_ids[i] for i in new] == [frame.provisional_ids[i] for i in new]
        assert new == list(range(new[0], new[-1] + 1))
    if accept == "never":
        assert tokens(out) == tokens(lm.generate(input_ids=[prompt(5)], max_new_tokens=20, sampler="sequential"))
    if accept == "always" and kind == "text":
        assert max(out.stats.accept_lengths) > 4


@pytest.mark.parametrize("kind", ["text", "intersection"])
@pytest.mark.parametrize("on_reject", ["ar", "dlm"])
def test_what_the_guide_has_read_is_what_stands_on_the_canvas_and_its_keys_are_fresh(kind, on_reject, monkeypatch):
    """After every step: guide tokens + rest = committed bytes + queue, and each stored key equals that of a full pass."""
    lm = tiny_lm(eos_token_ids=(EOS,))
    guide = Guide(kind, accept="aggressive", on_reject=on_reject)
    decide, checks = ForeignGuideHook.decide, []

    def checked(self, proposal):
        decision = decide(self, proposal)
        for b, text in enumerate(self.rows):
            canvas = self.loop.walk.wide["canvas"][b, :-1].clone()
            canvas[proposal.slots[b][decision.transfer_index[b]]] = decision.tokens[b][decision.transfer_index[b]]
            filled = ~self.loop.state.masked[b]
            filled[proposal.slots[b][decision.transfer_index[b]]] = True
            ids = canvas[: int(filled.long().cumprod(0).sum())].tolist()
            stop = EOS in ids or EOS in text.ids
            written = OWN.bytes_of(ids) + OWN.bytes_of(text.queue)
            if not stop:
                assert OTHER.bytes_of(text.ids) + text.rest == written
            at = torch.arange(len(text.ids))[None]
            fresh = self.model.new_store(1, len(text.ids))
            fresh.extent = 0
            empty = Attend.by_group(at, None, None, at[:, :0])
            self.model(torch.tensor([text.ids]), at, fresh, empty, rows=at, write=torch.ones_like(at, dtype=torch.bool))
            kept = self.run.store.data[:, :, b, :, : text.cached]
            assert torch.allclose(kept, fresh.data[:, :, 0, :, : text.cached], atol=1e-4)
            checks.append(text.cached)
        return decision

    monkeypatch.setattr(ForeignGuideHook, "decide", checked)
    lm.generate(**padded([prompt(4), prompt(7)]), max_new_tokens=18, guide=guide)
    assert max(checks) > 8


@pytest.mark.parametrize("kind", ["text", "intersection"])
def test_a_row_of_a_batch_equals_its_single_run(kind):
    lm = tiny_lm()
    rows = [prompt(3), prompt(9), prompt(6)]
    rules: list[dict[str, Any]] = [{"accept": "exact", "on_reject": "ar"}, {"accept": "topk"}]
    for rule in rules:
        both = lm.generate(**padded(rows), guide=Guide(kind, **rule), max_new_tokens=17, temperature=0.7, seed=5)
        for b, ids in enumerate(rows):
            single = lm.generate(
                input_ids=[ids], guide=Guide(kind, **rule), max_new_tokens=17, temperature=0.7, seed=5 + b
            )
            assert tokens(both, b) == tokens(single)
            assert both.row_stats[b].guide_nfe == single.stats.guide_nfe
            assert both.row_stats[b].accept_lengths == single.stats.accept_lengths


def test_accepted_pieces_shorter_and_longer_than_the_drafted_tokens_keep_the_right_ones():
    own = ByteVocabulary([None, None, None, b"a", b"b", b"\xe2", b"\x82", b"\xac", b"\xe2\x82\xac", b"ab"], (2,))
    other = ByteVocabulary([None, None, None, b"a", b"b", b"\xe2", b"\x82", b"\xac", b"b\xe2", b"\x82\xac"], (2,))
    # The guide cuts a, b+e2, 82+ac: its second token ends inside the drafted euro sign.
    assert other.encode(own.bytes_of([9, 8])) == [3, 8, 9]
    assert own.encode(b"ab\xe2") == [9, 5]
    assert own.encode(b"\x82\xac") == [6, 7]
    with pytest.raises(ValueError, match="0x63"):
        own.encode(b"abc")


def test_prompts_cross_by_bytes_and_special_tokens_by_spelling_then_by_role():
    own = ByteVocabulary([None, None, None, b"a", b"b"], (2,), {"<eos>": 2, "<user>": 1, "<odd>": 0})
    other = ByteVocabulary([b"b", b"a", None, None, b"<odd>"], (3,), {"<user>": 2, "<end>": 3})
    assert other.encode_prompt([1, 3, 4, 2, 0], own) == [2, 1, 0, 3, 4]


def test_random_bytes_come_back_from_a_byte_level_tokenizer():
    from dllm.target import load_tokenizer, target_folder

    tokenizer = load_tokenizer(target_folder("smollm2-135m"))
    vocabulary = ByteVocabulary.from_tokenizer(tokenizer, len(tokenizer), (tokenizer.eos_token_id,))
    chance, known = random.Random(3), sorted(vocabulary.alphabet)
    assert len(known) > 200
    for _ in range(50):
        data = bytes(chance.choice(known) for _ in range(chance.randint(0, 12)))
        assert vocabulary.bytes_of(vocabulary.encode(data)) == data
        text = "".join(chr(chance.choice([65, 32, 233, 8364, 128512, 20013])) for _ in range(8))
        assert vocabulary.encode(text.encode()) == tokenizer.encode(text, add_special_tokens=False)
        cut = text.encode()[: chance.randint(0, 8)]
        assert vocabulary.bytes_of(vocabulary.encode(cut)) == cut


@pytest.mark.parametrize(
    ("rule", "options", "match"),
    [
        ({"accept": "log_ratio"}, {}, "log_ratio"),
        ({"accept": "speculative", "on_reject": "ar"}, {}, "speculative"),
        ({"accept": "exact"}, {"min_new_tokens": 3}, "min_new_tokens"),
        ({"accept": "exact"}, {"eos_token_id": []}, "eos_token_id"),
    ],
)
def test_what_has_no_meaning_across_vocabularies_raises(rule, options, match):
    with pytest.raises(ValueError, match=match):
        tiny_lm().generate(input_ids=[prompt(5)], max_new_tokens=8, guide=Guide("text", **rule), **options)


def test_the_guide_is_barred_from_bytes_that_the_diffusion_model_cannot_write():
    poor = ByteVocabulary([p if p is None or 0xA9 not in p else None for p in OWN.pieces], (EOS,), {"<eos>": EOS})
    guide = Guide("text", accept="exact", on_reject="ar")
    ids = [3, 4, 5, 7]
    guide.start = lambda loop, tokenizer=None: guide.inner.start(loop, byte_vocabulary=poor)  # type: ignore[method-assign]
    out = tiny_lm(eos_token_ids=(EOS,)).generate(input_ids=[ids], max_new_tokens=20, guide=guide)
    data, barred = b"", torch.tensor([t != EOS and (p is None or 0xA9 in p) for t, p in enumerate(OTHER.pieces)])
    row = OTHER.encode_prompt(ids, poor)
    found = poor.bytes_of(tokens(out))
    while len(data) < len(found):
        at = torch.arange(len(row))[None]
        logits = guide.model.head(guide.model(torch.tensor([row]), at, None, Attend.causal(at))[0, -1]).clone()
        logits[barred] = -torch.inf
        row.append(int(logits.argmax()))
        data += OTHER.pieces[row[-1]] or b""
    assert found
    assert data.startswith(found)


def test_a_guide_without_bytes_for_the_text_is_refused():
    short = ByteVocabulary([None, None, None, b"a"], (EOS,))
    guide = ARGuide(tiny_decoder(1), (EOS,), None, Guided("exact", "ar"), "text", short)
    wrapped = Guide("text")
    wrapped.start = partial(lambda loop, tokenizer=None: guide.start(loop, byte_vocabulary=OWN))  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no token of this vocabulary"):
        tiny_lm().generate(input_ids=[prompt(5)], max_new_tokens=8, guide=wrapped)
