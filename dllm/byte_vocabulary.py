"""What bytes a token stands for, so that two tokenizers can talk about one text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


class ByteVocabulary:
    """The bytes of each token id (None: a token without bytes of its own, such as a special token).

    pieces: bytes of each id; stops: ids that end a text; names: special tokens by their spelling; tokenizer: cuts a valid text into
    ids as it was trained to (None: the longest token first).
    """

    def __init__(
        self,
        pieces: Sequence[bytes | None],
        stops: Sequence[int] = (),
        names: dict[str, int] | None = None,
        tokenizer: Any = None,
    ) -> None:
        self.pieces = list(pieces)
        self.stops = tuple(stops)
        self.names = dict(names or {})
        self.tokenizer = tokenizer
        self.spelling = {token: name for name, token in self.names.items()}
        self.ids: dict[bytes, int] = {}
        for token, piece in enumerate(self.pieces):
            if piece:
                self.ids.setdefault(piece, token)
        self.alphabet = frozenset(value for value in range(256) if bytes([value]) in self.ids)
        self.longest = max(map(len, self.ids), default=0)

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, vocab_size: int, stops: Sequence[int] = ()) -> ByteVocabulary:
        """From a fast transformers tokenizer with byte-level or byte-fallback tokens; ids up to vocab_size.

        Raises ValueError for one whose tokens are no bytes.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"a byte vocabulary needs a fast tokenizer: got {type(tokenizer).__name__}")
        decoder = json.dumps(json.loads(backend.to_str()).get("decoder"))
        level, fallback = '"ByteLevel"' in decoder, '"ByteFallback"' in decoder
        if not level and not fallback:
            raise ValueError("a byte vocabulary needs a byte-level or byte-fallback tokenizer: its decoder is neither")
        added = {token: str(entry) for token, entry in tokenizer.added_tokens_decoder.items()}
        special = set(tokenizer.all_special_ids) | {
            token for token, entry in tokenizer.added_tokens_decoder.items() if entry.special
        }
        table = _byte_letters()
        pieces: list[bytes | None] = [None] * vocab_size
        for text, token in tokenizer.get_vocab().items():
            if token >= vocab_size or token in special or token in stops:
                continue
            if token in added:
                pieces[token] = text.encode()
            elif level:
                pieces[token] = bytes(table[letter] for letter in text) if all(c in table for c in text) else None
            elif len(text) == 6 and text.startswith("<0x"):
                pieces[token] = bytes([int(text[3:5], 16)])
            else:
                pieces[token] = text.replace("\u2581", " ").encode()
        names = {added.get(token, ""): token for token in special if token < vocab_size}
        return cls(pieces, stops, names, tokenizer)

    def writes(self, piece: bytes | None) -> bool:
        """Whether each byte of a piece has a token here (tokenizers may leave out bytes that they never met); None: yes."""
        return piece is None or self.alphabet.issuperset(piece)

    def bytes_of(self, ids: Sequence[int]) -> bytes:
        """The bytes of ids, those without bytes left out."""
        return b"".join(self.pieces[token] or b"" for token in ids)

    def encode(self, data: bytes) -> list[int]:
        """Ids whose bytes are exactly ``data``, valid UTF-8 or not.

        The tokenizer's own cut of the part that is valid text, if that gives the bytes back; else the longest token first. Raises
        ValueError for bytes that no token has.
        """
        if self.tokenizer is not None:
            end = _valid_prefix(data)
            ids = self.tokenizer.encode(data[:end].decode(), add_special_tokens=False)
            # A normaliser or a marker of a text's start may have changed the bytes.
            if all(self.pieces[token] for token in ids) and self.bytes_of(ids) == data[:end]:
                return ids + self._longest_first(data[end:])
        return self._longest_first(data)

    def encode_prompt(self, ids: Sequence[int], other: ByteVocabulary) -> list[int]:
        """Tokens of this vocabulary for a prompt of another one: special tokens by spelling (stops by role), the rest by bytes."""
        out: list[int] = []
        data = b""
        for token in ids:
            piece = other.pieces[token]
            if piece is not None:
                data += piece
                continue
            mapped = self.names.get(other.spelling.get(token, ""))
            if mapped is None and token in other.stops and self.stops:
                mapped = self.stops[0]
            if mapped is None:
                # Nobody here knows the token: its spelling is the nearest thing.
                data += other.spelling.get(token, "").encode()
                continue
            out += self.encode(data) if data else []
            out.append(mapped)
            data = b""
        return out + (self.encode(data) if data else [])

    def _longest_first(self, data: bytes) -> list[int]:
        out, at = [], 0
        while at < len(data):
            for end in range(min(len(data), at + self.longest), at, -1):
                token = self.ids.get(data[at:end])
                if token is not None:
                    out.append(token)
                    at = end
                    break
            else:
                raise ValueError(f"no token of this vocabulary holds byte {data[at]:#04x}: it cannot write every text")
        return out


def _valid_prefix(data: bytes) -> int:
    """Length of the longest prefix that is valid UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.start
    return len(data)


def _byte_letters() -> dict[str, int]:
    """Letter -> byte of the byte-level alphabet of GPT-2: printable bytes stand for themselves, the others follow from code 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(value): value for value in plain}
    rest = [value for value in range(256) if value not in plain]
    table.update({chr(256 + index): value for index, value in enumerate(rest)})
    return table
