"""How byte-level BPE tokenizers cut text into words before merging, by the name that GGUF gives it
(`tokenizer.ggml.pre`).

Sources: the expressions are those of the tokenizer.json files that the models were published with, read by Oniguruma as
there; which GGUF name means which file is listed in llama.cpp, `src/llama-vocab.cpp` (names) and
`convert_hf_to_gguf.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACE}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_PUNCTUATION}|{_SPACE}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACE}"
)

# Words that start with capitals, or end with small letters (o200k); "tekken" is the same without contractions.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{0}}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{0}}"
_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_O200K = rf"{_CASED.replace('{0}', _CONTRACTION + '?')}|\p{{N}}{{1,3}}|{_SLASHED}|{_SPACE}"
_TEKKEN = rf"{_CASED.replace('{0}', '')}|\p{{N}}|{_SLASHED}|{_SPACE}"
_NO_HAN = r"&&[^\p{Han}]]"
_KIMI = (
    rf"[\p{{Han}}]+|{_CASED.replace('{0}', _CONTRACTION + '?').replace(_UPPER, _UPPER[:-1] + _NO_HAN)}"
    rf"|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACE}"
).replace(_LOWER, _LOWER[:-1] + _NO_HAN)


def _class(ranges: str) -> str:
    """A character class from hexadecimal code points and ranges: many characters would be unreadable."""
    parts = (r.split("-") for r in ranges.split())
    return "[" + "".join("-".join(chr(int(code, 16)) for code in part) for part in parts) + "]"


# Cased letters, as far as the file knows them.
_DEEPSEEK_LETTERS = (
    _class("""
    41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1
    3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A
    1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4
    1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128
    212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D
    A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F
    104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943""")
    + "+"
)
_DEEPSEEK_PUNCTUATION = _class("21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002") + "+"
_DEEPSEEK_CJK = _class("4E00-9FA5 800-4E00 AC00-D7FF") + "+"
_DEEPSEEK3_CJK = _class("4E00-9FA5 3040-309F 30A0-30FF") + "+"
_DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _SPACE
)
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED_CODER = rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACE}"
_EXAONE_MOE = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
# Groups of three digits counted from the right end of a number.
_DIGITS_FROM_RIGHT = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_ASIAN = (
    _class("""
    4E00-9FFF 3400-4DBF F900-FAFF 3040-309F 30A0-30FF FF65-FF9F 2F00-2FDF E40-E7F E80-EFF 1780-17FF 1000-109F
    AA60-AA7F A9E0-A9FF AC00-D7AF 1100-11FF""")
    + "+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """How one family of tokenizers cuts text.

    splits        each expression cuts what the ones before it left
    nfc           text is composed (Unicode NFC) first
    whole_words   a word that is a token is taken as it is, without merging
    adds_bos      bos comes first unless the file says otherwise
    """

    splits: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False
    adds_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        cuts = [pre_tokenizers.Split(Regex(s), "isolated") for s in self.splits]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

_GPT2_RULE = PreTokenizer((_GPT2,))
_DIGIT_RULE = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3_RULE = PreTokenizer((_LLAMA3,), whole_words=True, adds_bos=True)
_QWEN2_RULE = PreTokenizer((_QWEN2,), nfc=True)
_DEEPSEEK_WORDS = (rf"\s?{_DEEPSEEK_LETTERS}", rf"\s?{_DEEPSEEK_PUNCTUATION}", r"\s+$")
_DEEPSEEK_RULE = PreTokenizer((r"[\r\n]", *_DEEPSEEK_WORDS, _DEEPSEEK_CJK, r"\p{N}"))
_DEEPSEEK3_RULE = PreTokenizer((r"\p{N}{1,3}", _DEEPSEEK3_CJK, _DEEPSEEK3_WORDS))
_O200K_RULE = PreTokenizer((_O200K,))

_RULES: tuple[tuple[PreTokenizer, str], ...] = (
    (DEFAULT, "default"),
    (_GPT2_RULE, "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 jais trillion granite-docling modern-bert"),
    (PreTokenizer((_GPT2,), nfc=True), "olmo mpt"),
    (_LLAMA3_RULE, "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2"),
    (PreTokenizer((_LLAMA3,)), "dbrx smaug-bpe chatglm-bpe"),
    (PreTokenizer((_LLAMA3,), whole_words=True), "glm4 glm5"),
    (_QWEN2_RULE, "qwen2 deepseek-r1-qwen kormo megrez hunyuan"),
    (PreTokenizer((_QWEN2,)), "stablelm2 grok-2 solar-open"),
    (PreTokenizer((_QWEN35,), nfc=True), "qwen35"),
    (_DEEPSEEK_RULE, "deepseek-llm"),
    (PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")), "deepseek-coder"),
    (_DEEPSEEK3_RULE, "deepseek-v3 hunyuan-dense joyai-llm"),
    (_DIGIT_RULE, "smollm starcoder refact codeshell exaone minerva-7b mellum2"),
    (PreTokenizer((r"\p{N}", _GPT2), nfc=True), "command-r"),
    (PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")), "falcon"),
    (_O200K_RULE, "gpt-4o o200k llama4 kanana2 minimax-m2"),
    (PreTokenizer((_TEKKEN,), whole_words=True, adds_bos=True), "tekken"),
    (PreTokenizer((_KIMI,)), "kimi-k2"),
    (PreTokenizer((_BAILING,)), "bailingmoe bailingmoe2 llada-moe"),
    (PreTokenizer((_SEED_CODER,)), "seed-coder"),
    (PreTokenizer((_EXAONE_MOE,)), "exaone-moe"),
    (PreTokenizer((_DIGITS_FROM_RIGHT, _ASIAN, _DEEPSEEK3_WORDS)), "afmoe"),
)
PRE_TOKENIZERS = {name: rule for rule, names in _RULES for name in names.split()}
