"""Streams: pieces join to the decoded text, characters stay whole, stop strings never show."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_util import MODELS, SOURCES, golden, load

from colibri_offload.errors import TextError, UsageError
from colibri_offload.text.stream import TextStream

IDS = {m: st.lists(st.integers(0, 511), max_size=60) for m in MODELS}
# Mostly byte tokens, so that valid, cut and invalid UTF-8 all occur: Latin-1 letters and signs, or <0x00>…<0xFF>.
BYTES = {"qwen3_moe": st.integers(90, 256), "mixtral": st.integers(3, 258)}


def run(source, ids, stop=(), **keys):
    stream = TextStream(load(source), stop, **keys)
    pieces = [stream.push(i) for i in ids]
    pieces.append(stream.finish())
    assert "".join(pieces) == stream.text
    return stream, pieces


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("skip_special", [True, False])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_pieces_join_to_the_decoded_text(source, skip_special, data):
    model = source.split("-")[0]
    ids = data.draw(IDS[model] | st.lists(BYTES[model], max_size=30))
    stream, _ = run(source, ids, skip_special=skip_special)
    assert stream.text == load(source).decode(ids, skip_special=skip_special)


@given(ids=st.lists(st.integers(0, 486), max_size=60) | st.lists(BYTES["qwen3_moe"], max_size=30))
@settings(max_examples=100, deadline=None)
def test_byte_level_decode_is_the_library_s(ids):
    tokenizer = load("qwen3_moe-hub")
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special=skip) == tokenizer._backend.decode(ids, skip_special_tokens=skip)


@given(ids=st.lists(st.integers(0, 2) | st.integers(259, 511), max_size=60))
@settings(max_examples=100, deadline=None)
def test_sentencepiece_decode_is_the_library_s(ids):
    tokenizer = load("mixtral-hub")
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special=skip) == tokenizer._backend.decode(ids, skip_special_tokens=skip)


def test_bad_byte_tokens_spoil_only_themselves():
    """The library gives up a whole run of byte tokens when one is bad; a stream has shown the good ones by then."""
    byte = {b: 3 + b for b in range(256)}
    ids = [byte[b] for b in "今".encode()] + [byte[0xFF]]
    assert load("mixtral-hub").decode(ids) == "今\ufffd"


@pytest.mark.parametrize("source", SOURCES)
def test_characters_are_shown_whole_and_at_once(source):
    text = "x🙂é今👨‍👩‍👧"
    tokenizer = load(source)
    stream = TextStream(tokenizer)
    data = b""
    for i in tokenizer.encode(text, add_special=False):
        data += tokenizer.token_bytes(i)
        piece = stream.push(i)
        assert "\ufffd" not in piece
        assert stream.text == tokenizer.strip(data.decode("utf-8", "ignore"))
    assert stream.finish() == ""
    assert stream.text == text


@pytest.mark.parametrize("source", SOURCES)
def test_unfinished_character_at_the_end(source):
    tokenizer = load(source)
    ids = tokenizer.encode("a🙂", add_special=False)[:-1]
    stream, pieces = run(source, ids)
    assert stream.text == "a\ufffd"
    assert pieces[-1] == "\ufffd"


def first_stop(text, stop):
    """The text before the stop string that is completed first; of those completed together the longest counts."""
    for end in range(1, len(text) + 1):
        done = [s for s in stop if text[:end].endswith(s)]
        if done:
            return text[: end - max(map(len, done))]
    return None


@pytest.mark.parametrize("source", ["qwen3_moe-hub", "mixtral-hub"])
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_stop_strings_against_the_definition(source, data):
    tokenizer = load(source)
    text = data.draw(st.text(alphabet="ab\n🙂", max_size=14))
    stop = data.draw(st.lists(st.text(alphabet="ab\n🙂", min_size=1, max_size=4), max_size=3))
    ids = tokenizer.encode(text, add_special=False)
    stream = TextStream(tokenizer, stop)
    for i in ids:
        stream.push(i)
        # What has been shown can never turn out to be the beginning of a stop string.
        shown_if_stopped = first_stop(text, stop)
        assert shown_if_stopped is None or len(stream.text) <= len(shown_if_stopped)
    stream.finish()
    expected = first_stop(text, stop)
    assert stream.stopped == (expected is not None)
    assert stream.text == (text if expected is None else expected)


def test_stop_string_across_tokens_and_within_one():
    tokenizer = load("qwen3_moe-hub")
    ids = tokenizer.encode("one two three", add_special=False)
    for stop, expected in (
        (["two"], "one "),
        (["e t"], "on"),
        (["wo", "two t"], "one t"),
        (["three!"], "one two three"),
    ):
        stream, _ = run("qwen3_moe-hub", ids, stop)
        assert stream.text == expected, stop
        assert stream.stopped == (expected != "one two three")


def test_nothing_is_shown_after_a_stop():
    tokenizer = load("qwen3_moe-hub")
    stream = TextStream(tokenizer, ["b"])
    for i in tokenizer.encode("abc", add_special=False):
        stream.push(i)
    assert stream.push(tokenizer.encode("z")[0]) == ""
    assert (stream.finish(), stream.text, stream.stopped) == ("", "a", True)


def test_held_text_is_released_when_it_is_no_stop_string():
    tokenizer = load("qwen3_moe-hub")
    stream = TextStream(tokenizer, ["###"])
    (hash_id,) = set(tokenizer.encode("#"))
    assert stream.push(hash_id) == ""
    assert stream.push(tokenizer.encode("x")[0]) == "#x"


@pytest.mark.parametrize("source", SOURCES)
def test_golden_texts_stream(source):
    for case in golden(source.split("-")[0])["encodings"]:
        assert run(source, case["ids"])[0].text == case["decoded_skip_special"]


@pytest.mark.parametrize("stop", [[""], "text", ["a", ""], [3]])
def test_stop_strings_are_checked(stop):
    with pytest.raises(UsageError, match="must be a list of strings that are not empty"):
        TextStream(load("qwen3_moe-hub"), stop)


def test_id_out_of_range():
    with pytest.raises(TextError, match="token id 600 is outside 0…511; the tokenizer does not belong to this model"):
        TextStream(load("qwen3_moe-hub")).push(600)
