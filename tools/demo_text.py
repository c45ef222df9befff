"""What the demo reads: a real English text, a BPE tokenizer trained on it, and prompts cut out of it."""

from __future__ import annotations

import importlib.metadata
import itertools
import re
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from curvfs.errors import EnvironmentError_, UsageError

LICENSES = Path("/usr/share/common-licenses")
VOCABULARY = 4096


def find_text() -> tuple[str, str]:
    """(where it comes from, text): the licence texts of this machine, else the licence of this package."""
    texts = {}
    if LICENSES.is_dir():
        for path in sorted(LICENSES.iterdir(), key=lambda each: (each.name != "GPL-3", each.name)):
            if path.is_file() and not path.is_symlink():
                texts[path.name] = path.read_text(encoding="utf-8", errors="replace")
    if texts:
        return f"{len(texts)} licence texts under {LICENSES}", "\n\n".join(texts.values())
    own = importlib.metadata.distribution("curvfs").read_text("licenses/LICENSE")
    if not own:
        raise EnvironmentError_(
            f"No long English text was found: neither {LICENSES} nor this package's own licence is there; "
            "install the Debian package base-files."
        )
    return "the licence text of this package", own


def train_tokenizer(text: str) -> Tokenizer:
    """A byte-level BPE tokenizer of at most :data:`VOCABULARY` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


class Prompts:
    """Cuts prompts of an exact number of tokens out of a text, each from another paragraph, so that no two share a
    prefix. A text that is used up starts over, a paragraph further in."""

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        encoding = tokenizer.encode(text)
        self._tokens: list[int] = encoding.ids
        openings = {match.start(1) for match in re.finditer(r"(?:^|\n\n) *?( ?[A-Za-z])", text)}
        self._paragraphs = [index for index, (begin, _) in enumerate(encoding.offsets) if begin in openings]
        self._used = 0
        self._heads: set[tuple[int, ...]] = set()

    def cut(self, length: int) -> list[int]:
        """The next ``length`` tokens from the beginning of a paragraph on."""
        later = [start for start in self._paragraphs if start >= self._used]
        for start in later + self._paragraphs:
            onwards = itertools.chain(self._tokens[start:], itertools.cycle(self._tokens))
            tokens = list(itertools.islice(onwards, length))
            head = tuple(tokens[:16])
            if head not in self._heads:
                self._heads.add(head)
                self._used = start + length
                return tokens
        raise UsageError("This machine's text has too few paragraphs for that many prompts; ask for fewer.")
