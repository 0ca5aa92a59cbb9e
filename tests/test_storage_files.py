"""Converted stores that are damaged, truncated, mixed up or hostile: one clear error, and verify names it."""

import json
import random
import shutil
import time
from contextlib import suppress

import pytest
from storage_support import make_blocks, read_block, write_store

from colibri_offload.errors import ColibriError, CorruptRecordError, StoreError
from colibri_offload.storage.block_file import BlockFileStore
from colibri_offload.storage.checksum import crc32c
from colibri_offload.storage.header import EXPERTS, RESIDENT, pack_header
from colibri_offload.storage.manifest import digest_of
from colibri_offload.storage.open import open_store, verify_store

BLOCKS = make_blocks(2)
RESIDENTS = {"embed": bytes(range(256)) * 40, "norm": b"\xff\x00\xff\x00norm", "empty": b""}


@pytest.fixture(scope="module", params=["file", "lmdb"])
def original(request, tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("original") / "store", request.param, BLOCKS, RESIDENTS)


@pytest.fixture
def copy(original, tmp_path):
    return shutil.copytree(original, tmp_path / "copy")


def big_file(path):
    return path / ("experts.bin" if (path / "experts.bin").exists() else "experts.lmdb/data.mdb")


def flip(path, offset):
    with open(path, "r+b") as file:  # in place: the file may be open
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0xFF]))


def edit(path, change, *, seal=True):
    """Change the parsed manifest; with `seal` make all digests fit again, as a hostile author would."""
    document = json.loads((path / "manifest.json").read_text())
    del document["digest"]
    change(document)
    document["digest"] = digest_of(document) if seal else "0" * 64
    (path / "manifest.json").write_text(json.dumps(document))
    for name, kind in (("resident.bin", RESIDENT), ("experts.bin", EXPERTS)):
        if seal:
            content = (path / name).read_bytes()
            (path / name).write_bytes(pack_header(kind, document["digest"]) + content[4096:])


def test_crc32c_matches_the_standard():
    assert crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4
    assert crc32c(b"") == 0
    assert crc32c(b"6789", crc32c(b"12345")) == 0xE3069283


def test_layout_of_the_block_file(tmp_path):
    """Read by hand, as a program in another language would."""
    path = write_store(tmp_path / "store", "file", BLOCKS, RESIDENTS)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["version"] == 1 and manifest["kind"] == "file" and manifest["model"] == {"name": "test"}
    data = (path / "experts.bin").read_bytes()
    assert data[:4] == b"COLI" and len(data) % 4096 == 0
    assert data[8:40].hex() == manifest["digest"] == (path / "resident.bin").read_bytes()[8:40].hex()
    expected_offset = 4096
    for (layer, expert, offset, nbytes, crc), (key, block) in zip(manifest["experts"], BLOCKS.items(), strict=True):
        assert (layer, expert) == key and offset == expected_offset
        assert data[offset : offset + nbytes] == block and crc32c(block) == crc
        expected_offset = (offset + nbytes + 4095) // 4096 * 4096
    assert len(data) == expected_offset


def test_a_sound_store_verifies(original):
    calls = []
    assert verify_store(original, lambda done, total: calls.append((done, total))) == []
    total = sum(map(len, BLOCKS.values())) + sum(map(len, RESIDENTS.values()))
    assert calls[-1] == (total, total) and [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert len(calls) == len(BLOCKS) + len(RESIDENTS)


def test_verify_names_what_is_broken(copy):
    key = max(BLOCKS, key=lambda key: len(BLOCKS[key]))
    big = big_file(copy)
    flip(big, big.read_bytes().index(BLOCKS[key]) + len(BLOCKS[key]) - 1)
    flip(copy / "resident.bin", (copy / "resident.bin").read_bytes().index(RESIDENTS["norm"]))
    assert verify_store(copy) == ["resident norm", f"layer {key.layer} expert {key.expert}"]
    with open_store(copy) as store:
        with pytest.raises(CorruptRecordError, match=f"layer {key.layer} expert {key.expert}: checksum"):
            read_block(store, key)
        with pytest.raises(CorruptRecordError, match="'norm': checksum"):
            store.resident("norm")
        assert bytes(store.resident("embed")) == RESIDENTS["embed"]
        others = [other for other in BLOCKS if other != key]
        assert all(read_block(store, other) == BLOCKS[other] for other in others)


@pytest.mark.parametrize(("verify", "noticed"), [("first", False), ("always", True), ("never", False)])
def test_damage_after_the_first_read(copy, verify, noticed):
    key = max(BLOCKS, key=lambda key: len(BLOCKS[key]))
    with open_store(copy, verify) as store:
        read_block(store, key)
        store.resident("embed")
        flip(copy / "resident.bin", 5000)
        big = big_file(copy)
        content = big.read_bytes()
        with open(big, "r+b") as file:  # in place: LMDB has the file mapped
            file.seek(content.index(BLOCKS[key]))
            file.write(b"\0\1\2\3")
        if noticed:
            with pytest.raises(CorruptRecordError):
                read_block(store, key)
            with pytest.raises(CorruptRecordError):
                store.resident("embed")
        else:
            assert read_block(store, key) != BLOCKS[key]
            assert bytes(store.resident("embed")) != RESIDENTS["embed"]


def test_zero_filled_tail_is_found(copy):
    big = big_file(copy)
    content = big.read_bytes()
    key = max((key for key in BLOCKS if len(BLOCKS[key]) > 4096), key=lambda key: content.index(BLOCKS[key]))
    start = content.index(BLOCKS[key])
    with open(big, "r+b") as file:
        file.seek(start)
        file.write(bytes(len(BLOCKS[key])))
    assert f"layer {key.layer} expert {key.expert}" in verify_store(copy)


@pytest.mark.parametrize("name", ["resident.bin", "big"])
@pytest.mark.parametrize("left", [0, 3, 100, 4096, -4096, -1])
def test_truncated_files(copy, name, left):
    path = copy / "resident.bin" if name == "resident.bin" else big_file(copy)
    content = path.read_bytes()
    path.write_bytes(content[:left])
    with pytest.raises(StoreError, match=str(path.parent.name)) as caught:
        open_store(copy)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["resident.bin", "big", "manifest.json"])
def test_missing_files(copy, name):
    path = big_file(copy) if name == "big" else copy / name
    path.unlink()
    with pytest.raises(StoreError, match=r"missing|No such file"):
        open_store(copy)


def test_a_file_of_another_conversion(copy, tmp_path):
    other = write_store(tmp_path / "other", "file" if (copy / "experts.bin").exists() else "lmdb", make_blocks(3), {})
    shutil.copy(big_file(other), big_file(copy))
    with pytest.raises(StoreError, match="another manifest"):
        open_store(copy)


@pytest.mark.parametrize(
    ("offset", "message"),
    [(0, "COLI"), (4, "format version"), (6, "checksum"), (20, "checksum"), (40, "checksum")],
)
def test_damaged_headers(copy, offset, message):
    flip(copy / "resident.bin", offset)
    with pytest.raises(StoreError, match=message):
        open_store(copy)


def test_swapped_files(tmp_path):
    path = write_store(tmp_path / "store", "file", BLOCKS, RESIDENTS)
    shutil.copy(path / "experts.bin", path / "resident.bin")
    with pytest.raises(StoreError, match="swapped"):
        open_store(path)


def set_expert(i, value):
    return lambda document: document["experts"][0].__setitem__(i, value)


def set_resident(field, value):
    return lambda document: document["residents"]["embed"].__setitem__(field, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format="other"), "format is 'other'"),
        (lambda d: d.update(version=2), "version is 2"),
        (lambda d: d.update(kind="tape"), "kind is 'tape'"),
        (lambda d: d.update(experts={}), "experts is 'dict'"),
        (lambda d: d.update(residents=[]), "residents is 'list'"),
        (lambda d: d["experts"].append([1, 2]), r"experts\[10\] is \[1, 2\]"),
        (lambda d: d["experts"].append(d["experts"][0]), "not there before"),
        (lambda d: d["residents"].update(embed=5), "resident 'embed' is 'int'"),
        (set_expert(0, -1), "whole number"),
        (set_expert(0, True), "whole number"),
        (set_expert(1, 1 << 40), "whole number"),
        (set_expert(1, "a" * 1000), "whole number"),
        (set_expert(2, 4097), "multiple of 4096"),
        (set_expert(2, 0), "overlaps the header"),
        (set_expert(2, 1 << 60), "truncated"),
        (set_expert(3, 0), "at least 1"),
        (set_expert(3, 1 << 60), "truncated|overlaps"),
        (set_expert(3, 1.5), "whole number"),
        (set_expert(3, 4098), "overlaps"),
        (set_expert(4, 1 << 32), "whole number"),
        (set_resident("offset", None), "whole number"),
        (set_resident("nbytes", 1 << 50), "truncated|overlaps"),
        (set_resident("crc32c", -1), "whole number"),
        (set_resident("offset", 8192), "overlaps"),
    ],
)
def test_hostile_manifests(tmp_path, change, message):
    path = write_store(tmp_path / "store", "file", BLOCKS, RESIDENTS)
    edit(path, change)
    start = time.perf_counter()
    with pytest.raises(StoreError, match=message) as caught:
        BlockFileStore(path)
    assert time.perf_counter() - start < 1
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_an_edited_manifest_is_noticed(copy):
    edit(copy, lambda document: document.update(model={"name": "other"}), seal=False)
    with pytest.raises(StoreError, match="changed or damaged"):
        open_store(copy)


@pytest.mark.parametrize("text", ["", "{", "[" * 100000, "5", '{"version": ' + "9" * 10000 + "}", "\xff\xfe"])
def test_a_manifest_that_is_no_manifest(copy, text):
    (copy / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(StoreError, match=r"manifest\.json"):
        open_store(copy)


def test_a_directory_that_is_no_store(tmp_path):
    with pytest.raises(StoreError, match="no converted store"):
        open_store(tmp_path)


@pytest.mark.parametrize("seed", range(4))
def test_random_damage_gives_an_error_or_the_right_bytes(tmp_path, seed):
    """Never another exception, never wrong bytes. LMDB's own pages are left out: they have no checksums."""
    rng = random.Random(seed)
    original = write_store(tmp_path / "store", "file", BLOCKS, RESIDENTS)
    for round_ in range(25):
        name = rng.choice(["manifest.json", "resident.bin", "experts.bin"])
        content = (original / name).read_bytes()
        damaged = bytearray(content)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        if rng.random() < 0.3:
            damaged = damaged[: rng.randrange(len(damaged))]
        (original / name).write_bytes(damaged)
        try:
            with open_store(original, "always") as store:
                for key, data in BLOCKS.items():
                    with suppress(CorruptRecordError):
                        assert read_block(store, key) == data, f"seed {seed}, round {round_}"
        except ColibriError:
            pass
        (original / name).write_bytes(content)
