"""Weight formats: a file's rows → compute layout → floats, against golden values, the gguf package and NumPy twins."""

from __future__ import annotations

import numpy as np
import pytest
from jit_util import GOLDEN, aligned, dequantize, gather_rows, intact, kernels, pack_weights, random_rows, run

from colibri_offload.errors import UnsupportedError
from colibri_offload.jit.formats import FORMATS, ROWS, get_format
from colibri_offload.jit.kernels.pack import PackWeights

golden = np.load(GOLDEN)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal to the bit, signs of zeros aside (formats that subtract make +0 of −0)."""
    return bool(np.array_equal(a + np.float32(0), b + np.float32(0)))


def shapes(name: str) -> list[tuple[int, int]]:
    """Row counts around multiples of 16, column counts that do and do not fill a step."""
    block = FORMATS[name].block_elements
    few = {1: (32, 48, 96, 2048, 1, 33), 32: (32, 96, 2048, 160), 128: (128, 384, 2048), 256: (256, 768, 2048)}
    columns = few[block]
    return [(r, c) for r, c in zip((1, 15, 16, 17, 40, 3), columns, strict=False)]


@pytest.mark.parametrize(("name", "rows", "cols"), [(n, r, c) for n in FORMATS for r, c in shapes(n)])
def test_rows_survive_the_compute_layout(name: str, rows: int, cols: int) -> None:
    fmt, k = FORMATS[name], kernels()
    data = random_rows(fmt, np.random.default_rng(rows), rows, cols)
    packed = pack_weights(k, fmt, data, cols)
    assert np.array_equal(packed, fmt.pack(data, cols))
    ids = np.random.default_rng(1).permutation(rows)
    assert same_bits(gather_rows(k, fmt, packed, ids, cols), dequantize(fmt, data, cols)[ids])


def test_groups_may_be_taken_from_any_distance() -> None:
    """row_step and dst_stride interleave two matrices per 32 rows, as an expert record holds gate and up."""
    k, fmt, rng = kernels(), FORMATS["Q4_0"], np.random.default_rng(5)
    group = fmt.group_nbytes(64)
    out, want = aligned(8 * group), np.zeros((2, 2, 2, group), np.uint8)
    for m in range(2):
        rows = random_rows(fmt, rng, 50, 64)
        want[:, m] = fmt.pack(rows, 64).reshape(2, 2, group)
        for half in range(2):
            run(
                k.pack_weights(fmt), PackWeights, 2, src=rows[16 * half :], dst=out[(2 * m + half) * group :],
                zeros=np.zeros(256, np.uint8), rows=50 - 16 * half, row_stride=rows.shape[1], row_step=32,
                dst_stride=4 * group, blocks=2, steps=1,
            )  # fmt: skip
    assert np.array_equal(out, want.ravel()) and intact(out)


@pytest.mark.parametrize("name", FORMATS)
def test_every_byte_of_a_tile_is_written_once(name: str) -> None:
    """Padding too: bytes left as they were would make equal weights differ in their checksums."""
    fmt = FORMATS[name]
    written = np.zeros(fmt.tile_nbytes, int)
    for block in range(fmt.step // fmt.block_elements):
        for m in fmt.moves(block):
            assert m.src + m.width <= fmt.block_nbytes
            written[m.dst : m.dst + ROWS * m.width] += 1
    assert (written == 1).all()


@pytest.mark.parametrize("name", [n for n in FORMATS if f"{n}_raw" in golden])
def test_golden_values(name: str) -> None:
    fmt = FORMATS[name]
    want = golden[f"{name}_f32"]
    for rows in (1, 2):
        data = golden[f"{name}_raw"].reshape(rows, -1)
        cols = want.size // rows
        got = gather_rows(kernels(), fmt, pack_weights(kernels(), fmt, data, cols), np.arange(rows), cols)
        assert same_bits(got.ravel(), want)


def test_golden_file_covers_the_quantised_formats() -> None:
    assert {n for n in FORMATS if f"{n}_raw" not in golden} == {"F32", "F16", "INT8", "F8_E4M3", "Q4_Z"}


@pytest.mark.parametrize("name", [n for n in FORMATS if not FORMATS[n].is_float])
def test_padding_rows_and_columns_weigh_nothing(name: str) -> None:
    fmt, k = FORMATS[name], kernels()
    cols = fmt.block_elements
    data = random_rows(fmt, np.random.default_rng(2), 1, cols)
    packed = pack_weights(k, fmt, data, cols)
    whole = gather_rows(k, fmt, packed, np.arange(16), fmt.step)
    assert np.isfinite(whole).all() and np.any(whole[0, :cols])
    assert not np.any(np.abs(whole[0, cols:]) > 1e-35) and not np.any(np.abs(whole[1:]) > 1e-35)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0"])
def test_quantisers_equal_the_reference(name: str) -> None:
    assert np.array_equal(FORMATS[name].quantize(golden["quant_in"]), golden[f"quant_{name}"])


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0"])
def test_quantisers_of_hard_blocks(name: str) -> None:
    """Zero blocks, one value, ties between ±max, values at rounding boundaries: all as the gguf package does."""
    from gguf import GGMLQuantizationType, quants

    rng = np.random.default_rng(3)
    x = rng.standard_normal((8, 64)).astype(np.float32)
    x[0] = 0
    x[1, 5:] = 0
    x[2, :32] = np.linspace(-1, 1, 32)
    x[3] = np.rint(x[3] * 254) / 2
    x[4] *= 1e-6
    x[5] *= 1e4
    assert np.array_equal(FORMATS[name].quantize(x), quants.quantize(x, GGMLQuantizationType[name]))


def test_float_quantisers() -> None:
    rng = np.random.default_rng(4)
    x = (rng.standard_normal((4, 256)) * 10.0 ** rng.integers(-8, 5, (4, 256))).astype(np.float32)
    assert np.array_equal(FORMATS["F32"].quantize(x).view(np.float32), x)
    assert np.array_equal(FORMATS["F16"].quantize(x).view(np.uint16), x.astype(np.float16).view(np.uint16))
    # round to nearest even, written as a comparison with both neighbours
    down = x.view(np.uint32) >> 16
    low, high = ((down + i << 16).astype(np.uint32).view(np.float32).astype(np.float64) for i in (0, 1))
    distance = (x - low) - (high - x)
    sign = np.sign(x).astype(np.float64)
    up = (distance * sign > 0) | ((distance == 0) & (down % 2 == 1))
    assert np.array_equal(FORMATS["BF16"].quantize(x).view(np.uint16), (down + up).astype(np.uint16))


def test_bf16_keeps_nan_and_infinity() -> None:
    x = np.array([[np.nan, np.inf, -np.inf, np.float32(np.uint32(0x7F800001).view(np.float32))]], np.float32)
    back = dequantize(FORMATS["BF16"], FORMATS["BF16"].quantize(x), 4)
    assert np.array_equal(back, x, equal_nan=True)


def test_every_half_is_loaded_exactly() -> None:
    """All 65,536 halves, subnormals, infinities and NaNs included."""
    halves = np.arange(65536, dtype=np.uint16).view(np.float16).reshape(32, 2048)
    packed = pack_weights(kernels(), FORMATS["F16"], halves.view(np.uint8), 2048)
    got = gather_rows(kernels(), FORMATS["F16"], packed, np.arange(32), 2048)
    assert np.array_equal(got, halves.astype(np.float32), equal_nan=True)


def test_formats_without_a_quantiser_say_so() -> None:
    can = {n for n, f in FORMATS.items() if f.can_quantize}
    assert can == {"F32", "F16", "BF16", "Q8_0", "Q4_0", "INT8"}
    with pytest.raises(NotImplementedError, match="Q4_K has no quantiser"):
        FORMATS["Q4_K"].quantize(np.zeros((1, 256), np.float32))


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"'IQ1_S'.*supported: F32"):
        get_format("IQ1_S")
