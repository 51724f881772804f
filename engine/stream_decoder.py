"""`StreamDecoder`: text as it is generated, token by token, in whole characters."""

from __future__ import annotations

import codecs

from antiphon.engine.tokenizer import Tokenizer


class StreamDecoder:
    """Turns ids into text as they come; all pushes and the flush joined equal `Tokenizer.decode` of all ids.

    A character whose bytes are spread over several tokens is held back until it is whole. U+FFFD comes out only where
    the model wrote it, or wrote bytes that are no character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes; raises `InputError` for an id outside the vocabulary."""
        return self._bytes.decode(_token_bytes(self._tokenizer.token_text(token_id)))

    def flush(self) -> str:
        """What an unfinished character left, U+FFFD; the decoder can then be used afresh."""
        rest = self._bytes.decode(b"", final=True)
        self._bytes.reset()
        return rest


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet, in which every byte is one printable character (`bytes_to_unicode` in its encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def _token_bytes(text: str) -> bytes:
    """A token's bytes. An added token with a character outside the alphabet stands for itself, as in `tokenizers`."""
    found = [_BYTE_OF_CHAR.get(char) for char in text]
    known = [byte for byte in found if byte is not None]
    return bytes(known) if len(known) == len(found) else text.encode()
