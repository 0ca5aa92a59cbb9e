"""A conversion killed at any line and resumed gives the same store; nothing half-made ever has the final name.

The killing is done by this file run as a program: `python test_storage_kill.py KIND DIRECTORY SEED POINTS` forks a
writer that sends itself SIGKILL after a given number of executed lines of the storage package.
"""

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from storage_support import make_blocks, read_block

from colibri_offload.errors import StoreError
from colibri_offload.storage import expert_sinks, writer
from colibri_offload.storage.open import open_store, verify_store
from colibri_offload.storage.writer import StoreWriter

BLOCKS = make_blocks(5)
RESIDENTS = {"embed": bytes(range(256)) * 60, "norm": b"1234", "head": b"h" * 5000}


def convert(path, kind, overwrite=False):
    with StoreWriter(path, kind, model={"m": 1}, resume=True, overwrite=overwrite) as out:
        items = list(BLOCKS.items())
        for name, data in RESIDENTS.items():
            out.add_resident(name, data, [len(data)])
            for key, block in items[:2]:
                if not out.has_expert(key):
                    out.add_expert(key, block)
            del items[:2]
        for key, block in items:
            out.add_expert(key, block)
        out.finish()


def content(path):
    """Everything that a reader can see; for a block file also every byte of every file."""
    with open_store(path) as store:
        blocks = [(key, read_block(store, key)) for key in store.keys()]  # noqa: SIM118
        residents = [(name, bytes(store.resident(name)), store.resident_meta(name)) for name in store.resident_names()]
    names = sorted(p.name for p in path.iterdir() if p.name != "experts.lmdb")
    return blocks, residents, [(name, hashlib.sha256((path / name).read_bytes()).hexdigest()) for name in names]


def counting_tracer(limit):
    """A trace function that counts lines of the storage package and kills the process at `limit`."""
    folder = os.path.dirname(writer.__file__)
    lines = [0]

    def trace(frame, event, arg):
        if not frame.f_code.co_filename.startswith(folder):
            return None
        if event == "line":
            lines[0] += 1
            if lines[0] == limit:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    return trace, lines


def in_child(limit, path, kind, overwrite=False):
    """Convert in a child that is killed at line `limit`. Returns whether it was, and how many lines it ran."""
    receiver, sender = os.pipe()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            trace, lines = counting_tracer(limit)
            sys.settrace(trace)
            try:
                convert(path, kind, overwrite)
            except StoreError as error:  # killed after the rename: the store is complete
                assert "already there" in str(error)
            sys.settrace(None)
            os.write(sender, str(lines[0]).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(sender)
    _, status = os.waitpid(pid, 0)
    with os.fdopen(receiver) as pipe:
        text = pipe.read()
    killed = os.WIFSIGNALED(status)
    assert killed or os.WEXITSTATUS(status) == 0, f"the converter failed after line {limit}"
    return killed, int(text or 0)


def drive(kind, directory, seed, points):
    expert_sinks._BATCH_NBYTES = 20000  # several LMDB transactions, as a large model has
    rng = random.Random(seed)
    reference = directory / "reference"
    _, lines = in_child(-1, reference, kind)
    expected = content(reference)
    limits = {*range(lines - 30, lines + 1, 2), *rng.sample(range(1, lines), points)}  # the renames are at the end
    for limit in sorted(limits):
        path = directory / "store"
        killed, _ = in_child(limit, path, kind)
        if path.exists():
            assert content(path) == expected, f"a half store after line {limit}"
        while killed:
            killed, _ = in_child(rng.choice([rng.randrange(1, lines), -1]), path, kind)
            if path.exists():
                assert content(path) == expected, f"a half store after line {limit} and a resumption"
        assert content(path) == expected, f"another store after line {limit}"
        assert sorted(os.listdir(directory)) == ["reference", "store"], f"rubbish after line {limit}"
        shutil.rmtree(path)
    print(f"{len(limits)} kills of {lines} lines")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(("kind", "points"), [("file", 25), ("lmdb", 15)])
def test_killed_at_any_line_and_resumed(tmp_path, kind, points):
    seed = int(time.time())
    command = [sys.executable, __file__, kind, str(tmp_path), str(seed), str(points)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"seed {seed}: {done.stdout}{done.stderr}"
    assert "kills of" in done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_while_replacing_a_store(tmp_path):
    """Overwriting needs two renames. Between them the name is free, and the next start brings the old store back."""
    command = [sys.executable, __file__, "replace", str(tmp_path), "0", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def drive_replacement(directory):
    path, old = directory / "store", directory / "old"
    with StoreWriter(old, model={"old": True}) as out:
        out.add_expert((0, 0), b"old")
        out.finish()
    shutil.copytree(old, directory / "reference")
    _, lines = in_child(-1, directory / "reference", "file", overwrite=True)
    old_content, new_content = content(old), content(directory / "reference")
    absent = 0
    for limit in range(lines - 60, lines + 1):
        shutil.copytree(old, path)
        killed, _ = in_child(limit, path, "file", overwrite=True)
        absent += not path.exists()
        if path.exists():
            assert content(path) in (old_content, new_content), f"a half store after line {limit}"
        else:
            with pytest.raises(StoreError, match="already there"):
                StoreWriter(path, model=None)
            assert content(path) == old_content
        if killed:
            in_child(-1, path, "file", overwrite=True)
        assert content(path) == new_content
        assert sorted(os.listdir(directory)) == ["old", "reference", "store"], f"rubbish after line {limit}"
        shutil.rmtree(path)
    assert absent, "no kill hit the moment between the renames"


def test_killed_by_the_clock(tmp_path):
    """The same from outside: a separate process, killed while it writes."""
    blocks = make_blocks(6, layers=3, experts=40)
    code = (
        "import sys; from test_storage_kill import *; from storage_support import make_blocks\n"
        "with StoreWriter(sys.argv[1], model=0, resume=True) as out:\n"
        "    print('go', flush=True)\n"
        "    for key, block in make_blocks(6, layers=3, experts=40).items():\n"
        "        out.add_expert(key, block); time.sleep(0.002)\n"
        "    out.finish()\n"
    )
    path, kills = tmp_path / "store", 0
    for delay in (0.05, 0.1, None):
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, cwd=Path(__file__).parent
        )
        assert child.stdout is not None and child.stdout.readline() == b"go\n"
        if delay is not None:
            time.sleep(delay)
            child.kill()
            kills += 1
            assert not path.exists()
        child.stdout.close()
        assert child.wait(60) == (0 if delay is None else -signal.SIGKILL)
    assert kills == 2 and verify_store(path) == []
    with open_store(path) as store:
        assert {key: read_block(store, key) for key in blocks} == blocks


if __name__ == "__main__":
    if sys.argv[1] == "replace":
        drive_replacement(Path(sys.argv[2]))
    else:
        drive(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
