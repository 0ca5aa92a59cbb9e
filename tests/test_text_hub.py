"""Hub directories: the files that may hold a fact, which one wins, and what is said when one is missing or wrong."""

import json
import shutil

import pytest
from text_util import DATA, SOURCES, golden, load, model_of

from colibri_offload.errors import TextError
from colibri_offload.text.hub import from_directory


@pytest.fixture
def copy(tmp_path):
    """copy(model, {config changes}, drop=…) → a changed copy of a golden directory."""

    def make(model, config=None, *, drop=()):
        folder = tmp_path / model
        shutil.copytree(DATA / model, folder)
        path = folder / "tokenizer_config.json"
        changed = json.loads(path.read_text(encoding="utf-8")) | (config or {})
        path.write_text(json.dumps({k: v for k, v in changed.items() if v is not ...}), encoding="utf-8")
        for name in drop:
            (folder / name).unlink()
        return folder

    return make


@pytest.mark.parametrize("source", SOURCES)
def test_saved_tokenizer_is_equal(source, tmp_path):
    before = load(source)
    before.save(tmp_path / "größe 1")
    after = from_directory(tmp_path / "größe 1")
    for fact in (
        "vocab_size",
        "padded_size",
        "bos_id",
        "unk_id",
        "eos_ids",
        "special_ids",
        "special_tokens",
        "chat_templates",
    ):
        assert getattr(after, fact) == getattr(before, fact), fact
    for case in golden(model_of(source))["encodings"]:
        assert after.encode(case["text"]) == before.encode(case["text"])
        assert after.encode(case["text"], allow_special=True) == case["ids"]
        assert after.decode(case["ids"]) == case["decoded_skip_special"]
    assert not [p for p in (tmp_path / "größe 1").iterdir() if p.suffix == ".tmp"]


def test_several_templates_are_saved(copy, tmp_path):
    templates = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    before = from_directory(copy("qwen3_moe", {"chat_template": templates}))
    before.save(tmp_path / "out")
    after = from_directory(tmp_path / "out")
    message = [{"role": "user", "content": "x"}]
    assert after.render_chat(message) == "D"
    assert after.render_chat(message, tools=[{"type": "function"}]) == "T"


@pytest.mark.parametrize("case", golden("qwen3_moe")["encodings"], ids=lambda c: repr(c["text"])[:20])
def test_vocab_and_merges_files(case, copy):
    tokenizer = from_directory(copy("qwen3_moe", drop=["tokenizer.json"]))
    assert tokenizer.encode(case["text"], allow_special=True) == case["ids"]
    assert tokenizer.decode(case["ids"]) == case["decoded_skip_special"]


@pytest.mark.parametrize("post_processor", ["as it is", "none"])
@pytest.mark.parametrize(
    ("config", "bos", "eos"),
    [
        ({"add_bos_token": True, "add_eos_token": False}, 1, 0),
        ({"add_bos_token": True, "add_eos_token": True}, 1, 1),
        ({"add_bos_token": False, "add_eos_token": False}, 0, 0),
        ({"add_bos_token": ..., "add_eos_token": False}, 1, 0),  # LlamaTokenizer's own default
    ],
)
def test_bos_and_eos_are_added_once(config, bos, eos, post_processor, copy):
    folder = copy("mixtral", config)
    if post_processor == "none":
        path = folder / "tokenizer.json"
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"post_processor": None}))
    ids = from_directory(folder).encode("Hello")
    assert (ids.count(1), ids.count(2)) == (bos, eos)
    assert ids[0] == 1 or not bos
    assert ids[-1] == 2 or not eos


def test_bos_without_a_bos_token(copy):
    with pytest.raises(TextError, match=r"tokenizer_config\.json: add_bos_token is true but there is no bos"):
        from_directory(copy("qwen3_moe", {"add_bos_token": True}))


def test_token_written_as_an_object(copy):
    tokenizer = from_directory(copy("mixtral", {"bos_token": {"content": "<s>", "lstrip": False}}))
    assert tokenizer.bos_id == 1


def test_special_tokens_map_fills_gaps(copy):
    folder = copy("mixtral", {"bos_token": ..., "eos_token": ...})
    (folder / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}, "eos_token": "</s>"}')
    tokenizer = from_directory(folder)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, {2})


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [('{"eos_token_id": [480, 5]}', '{"eos_token_id": 7}', {480, 5, 482}), (None, '{"eos_token_id": 7}', {7, 482})],
)
def test_eos_ids_from_the_generation_config_first(generation, config, expected, copy):
    folder = copy("qwen3_moe", drop=["generation_config.json"])
    if generation:
        (folder / "generation_config.json").write_text(generation)
    (folder / "config.json").write_text(config)
    assert from_directory(folder).eos_ids == expected


def test_added_tokens_that_tokenizer_json_lacks(copy):
    folder = copy("qwen3_moe")
    decoder = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))["added_tokens_decoder"]
    decoder["487"] = {"content": "<|new|>", "special": True}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    tokenizer = from_directory(folder)
    assert tokenizer.encode("a<|new|>", allow_special=True)[-1] == 487
    assert 487 in tokenizer.special_ids


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("chat_template.jinja", "from file", "from file"),
        ("chat_template.json", '{"chat_template": "from json"}', "from json"),
    ],
)
def test_template_files_win(file, text, expected, copy):
    folder = copy("qwen3_moe")
    (folder / file).write_text(text)
    assert from_directory(folder).chat_template == expected


def test_no_template_is_an_error_that_names_the_remedy(copy):
    tokenizer = from_directory(copy("qwen3_moe", {"chat_template": None}))
    assert tokenizer.chat_template is None
    with pytest.raises(TextError, match="no default chat template; pass --raw"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("drop", "write", "message"),
    [
        (["tokenizer.json", "merges.txt"], {}, r"no merges\.txt \(for vocab\.json\)"),
        (["tokenizer.json", "merges.txt", "vocab.json"], {}, r"no tokenizer\.json, nor vocab\.json with merges\.txt"),
        (["tokenizer.json", "vocab.json"], {"tokenizer.model": "x"}, r"has tokenizer\.model but no tokenizer\.json"),
        ([], {"tokenizer.json": '{"version": "1.0"'}, r"tokenizer\.json: .*download it again"),
        ([], {"tokenizer_config.json": "[1]"}, r"tokenizer_config\.json: holds a list, not an object"),
        ([], {"tokenizer_config.json": "{"}, r"tokenizer_config\.json: cannot be read as JSON"),
        ([], {"tokenizer_config.json": '{"added_tokens_decoder": {"x": {}}}'}, "added_tokens_decoder is malformed"),
        ([], {"tokenizer_config.json": '{"eos_token": "<nope>"}'}, "eos_token '<nope>' is not in the vocabulary"),
        ([], {"tokenizer_config.json": '{"chat_template": [{"name": "a"}]}'}, "lacks its name or template"),
        (
            [],
            {"generation_config.json": '{"eos_token_id": ["x"]}'},
            r"generation_config\.json: eos_token_id is \['x'\]",
        ),
        (
            ["tokenizer.json"],
            {"tokenizer_config.json": '{"tokenizer_class": "Odd"}'},
            "tokenizer_class 'Odd' does not say",
        ),
    ],
)
def test_errors_name_the_file(drop, write, message, copy):
    folder = copy("qwen3_moe", drop=drop)
    for name, text in write.items():
        (folder / name).write_text(text)
    with pytest.raises(TextError, match=message) as e:
        from_directory(folder)
    assert "\n" not in str(e.value)


def test_added_token_with_a_foreign_id(copy):
    with pytest.raises(TextError, match="added token '<x>' has id 900, but 487 in the vocabulary"):
        from_directory(copy("qwen3_moe", {"added_tokens_decoder": {"900": {"content": "<x>"}}}))


def test_decoder_that_is_not_understood(copy):
    folder = copy("qwen3_moe")
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"decoder": {"type": "CTC"} | CTC}))
    with pytest.raises(TextError, match="decoder step 'CTC' is not supported"):
        from_directory(folder)


CTC = {"pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}


def test_truncation_in_the_file_is_switched_off(copy):
    folder = copy("qwen3_moe")
    path = folder / "tokenizer.json"
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"truncation": cut}))
    assert len(from_directory(folder).encode("a b c d e f g")) > 3
