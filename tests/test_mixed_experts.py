"""One layer has one expert layout. Experts stored one by one could differ (a quantisation's skip list): packed in the
first one's format they would give garbage, so they are refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from golden_util import GOLDEN
from safetensors.numpy import load_file, save_file

from colibri_offload import Engine
from colibri_offload.errors import UnsupportedError


def test_experts_of_one_layer_must_have_one_format(tmp_path: Path) -> None:
    model = tmp_path / "mixed"
    shutil.copytree(GOLDEN / "mixtral", model)
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    tensors[name] = tensors[name].astype(np.float16)
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(UnsupportedError, match="layer 1 expert 3 has formats F32, F32, F16, expert 0 has F32"):
        Engine.load(model)
