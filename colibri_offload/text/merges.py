"""The merge table of a SentencePiece BPE vocabulary, which stores scores instead.

SentencePiece merges, of all neighbouring pieces whose join is a piece, those with the best-scored join first. A merge
table says the same as a list: every split of every piece into two pieces, best score first.
Source: Kudo & Richardson 2018, arXiv:1808.06226; Hugging Face's LlamaConverter derives it likewise.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def merges_from_scores(
    pieces: Sequence[str], scores: Sequence[float], mergeable: Collection[int]
) -> list[tuple[str, str]]:
    """Merges in order of preference. Only the ids in `mergeable` take part: control and byte tokens are never built."""
    known = {pieces[i]: i for i in mergeable}
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, i in known.items():
        for cut in range(1, len(piece)):
            left, right = known.get(piece[:cut]), known.get(piece[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[i], left, right, piece[:cut], piece[cut:]))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]
