"""The definition of the numbers against known values, exact rationals, and a second, slower writing of it."""

from fractions import Fraction

import numpy as np
import pytest

import cases
from msda import reference

ALL = ("value", "sampling_locations", "attention_weights")


def assert_same_bits(actual, expected):
    """Compare dtype, shape and bytes; any NaN equals any NaN."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    unsigned = f"u{actual.dtype.itemsize}"
    differ = np.ascontiguousarray(actual).view(unsigned) != np.ascontiguousarray(expected).view(unsigned)
    differ &= ~(np.isnan(actual) & np.isnan(expected))
    first = [
        (index, actual[tuple(index)], expected[tuple(index)]) for index in np.argwhere(differ)[:1].tolist()
    ]
    assert not differ.any(), f"{differ.sum()} of {differ.size} differ: {first}"


def named_dtype(name):
    return np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else name)


def is_plus_zero(array):
    return (array == 0) & ~np.signbit(array)


# ---- cases with known values ----------------------------------------------------------------------------


def results_of(case, dtype):
    """Compute a case in a dtype; give the results under the names they have in the file."""
    inputs = [case[key] if case[key].dtype.kind == "i" else case[key].astype(dtype) for key in cases.INPUTS]
    output = reference.forward(*inputs)
    gradients = reference.backward(*inputs, case["grad_output"].astype(dtype))
    return dict(zip(cases.RESULTS, (output, *gradients), strict=True))


def relative_error(actual, expected):
    return np.linalg.norm(actual.astype(np.float64) - expected) / np.linalg.norm(expected)


def test_there_are_cases():
    assert {"border", "large_mean", "outside_and_nonfinite"} < set(cases.names())


@pytest.mark.parametrize("name", cases.names())
def test_cases_in_float32(name):
    case = cases.load(name)
    for key, result in results_of(case, np.float32).items():
        assert result.dtype == np.float32
        assert result.shape == case[key].shape
        assert relative_error(result, case[key]) <= (2e-7 if key == "grad_value" else 1.5e-7), key


@pytest.mark.parametrize("name", cases.names())
def test_cases_in_float64(name):
    case = cases.load(name)
    for key, result in results_of(case, np.float64).items():
        assert result.dtype == np.float64
        assert relative_error(result, case[key]) <= 1e-13, key


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", cases.names())
def test_zeros_are_exact(name, dtype):
    case = cases.load(name)
    for key, result in results_of(case, dtype).items():
        assert np.array_equal(result == 0, case[key] == 0), key
        assert is_plus_zero(result[case[key] == 0]).all(), key


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_example_of_the_operators_document(dtype):
    results = results_of(cases.load("document_example"), dtype)
    assert (results["grad_value"] == 8.0).all()
    assert (results["grad_sampling_locations"] == 4.0).all()
    assert (results["grad_attention_weights"] == 2.0).all()


# ---- the same, written a second time with scalars -------------------------------------------------------


def transcribe(value, levels, locations, weights, grad_output, query_block):
    """Compute output and gradients of arrays of one dtype, float32 or float64, one scalar at a time."""
    real = value.dtype.type
    lanes = {np.float32: 16, np.float64: 8}[real]
    bs, num_keys, num_heads, channels = value.shape
    num_queries, num_points = locations.shape[1], locations.shape[4]
    zero, one = real(0), real(1)
    output = np.zeros((bs, num_queries, num_heads * channels), real)
    grad_value = np.zeros(value.shape, real)
    grad_locations = np.zeros(locations.shape, real)
    grad_weights = np.zeros(weights.shape, real)
    blocks = -(-num_queries // query_block)

    def dot(left, right):
        sums = [zero] * lanes
        for c in range(channels):
            sums[c % lanes] = sums[c % lanes] + left[c] * right[c]
        half = lanes // 2
        while half:
            sums = [sums[j] + sums[j + half] for j in range(half)]
            half //= 2
        return sums[0]

    for b, h, block in np.ndindex(bs, num_heads, blocks):
        private = np.zeros((num_keys, channels), real)
        for q in range(block * num_queries // blocks, (block + 1) * num_queries // blocks):
            g = grad_output[b, q, h * channels : (h + 1) * channels]
            total = [zero] * channels
            for lvl, (height, width, start) in enumerate(levels):
                level_total = [zero] * channels
                for p in range(num_points):
                    attn = weights[b, q, h, lvl, p]
                    x = np.float64(locations[b, q, h, lvl, p, 0]) * np.float64(width) - np.float64(0.5)
                    y = np.float64(locations[b, q, h, lvl, p, 1]) * np.float64(height) - np.float64(0.5)
                    if not (-1 < x < width and -1 < y < height and width > 0 and height > 0):
                        continue
                    x0, y0 = int(np.floor(x)), int(np.floor(y))
                    dx, dy = real(x - np.floor(x)), real(y - np.floor(y))
                    corner_weights = ((one - dx) * (one - dy), dx * (one - dy), (one - dx) * dy, dx * dy)
                    corners = []
                    for corner, weight in enumerate(corner_weights):
                        row, column = y0 + corner // 2, x0 + corner % 2
                        if 0 <= row < height and 0 <= column < width:
                            key = start + row * width + column
                            corners.append(value[b, key, h])
                            for c in range(channels):
                                private[key, c] = private[key, c] + (attn * weight) * g[c]
                        else:
                            corners.append([zero] * channels)
                    s, s_x, s_y = [], [], []
                    for v00, v01, v10, v11 in zip(*corners, strict=True):
                        ex = v01 - v00
                        fx = v11 - v10
                        t = v00 + dx * ex
                        bottom = v10 + dx * fx
                        d = bottom - t
                        s.append(t + dy * d)
                        s_x.append(ex + dy * (fx - ex))
                        s_y.append(d)
                    for c in range(channels):
                        level_total[c] = level_total[c] + attn * s[c]
                    grad_weights[b, q, h, lvl, p] = dot(s, g)
                    grad_locations[b, q, h, lvl, p, 0] = (attn * real(width)) * dot(s_x, g)
                    grad_locations[b, q, h, lvl, p, 1] = (attn * real(height)) * dot(s_y, g)
                for c in range(channels):
                    total[c] = total[c] + level_total[c]
            for c in range(channels):
                output[b, q, h * channels + c] = total[c]
        for key, c in np.ndindex(num_keys, channels):
            grad_value[b, key, h, c] = grad_value[b, key, h, c] + private[key, c]
    return output, grad_value, grad_locations, grad_weights


def random_case(rng, dtype, shape, levels, num_keys, odd=0.0):
    """Draw a call's arrays; a share `odd` of the numbers is -0, NaN, infinite, tiny or huge.

    Half of the locations lie on pixel centres, borders and their nearest neighbours.
    """
    bs, num_queries, num_heads, num_points, channels = shape
    tiny, huge = np.finfo(dtype).smallest_subnormal, np.finfo(dtype).max
    oddities = np.array([-0.0, 0.0, np.nan, np.inf, -np.inf, tiny, huge], dtype)

    def draw(*size):
        numbers = (rng.standard_normal(size) * 2.0 ** rng.integers(-3, 4, size)).astype(dtype)
        return np.where(rng.random(size) < odd, rng.choice(oddities, size), numbers).astype(dtype)

    sizes = np.array([(width, height) for height, width, _ in levels], np.float64).reshape(-1, 1, 2)
    size = (bs, num_queries, num_heads, len(levels), num_points, 2)
    pixels = np.maximum(sizes, 1)
    grid = (rng.integers(-2, 2 * pixels.astype(int) + 3, size) / 2 / pixels).astype(dtype)
    grid = np.where(rng.random(size) < 0.5, grid, np.nextafter(grid, rng.choice([-9, 9], size).astype(dtype)))
    locations = np.where(rng.random(size) < 0.5, grid, rng.uniform(-0.3, 1.3, size).astype(dtype))
    locations = np.where(rng.random(size) < odd, rng.choice(oddities, size), locations)
    return (
        draw(bs, num_keys, num_heads, channels),
        locations.astype(dtype),
        draw(*size[:-1]),
        draw(bs, num_queries, num_heads * channels),
    )


# (bs, queries, heads, points, channels), levels (height, width, start), num_keys
SHAPES = {
    "rectangles": ((2, 5, 2, 2, 3), [(2, 3, 0), (4, 2, 6)], 14),
    "many_sums": ((1, 14, 1, 5, 2), [(2, 2, 0), (1, 2, 4), (2, 1, 6)], 8),
    "one_pixel": ((1, 11, 1, 3, 2), [(1, 1, 0)], 1),
    "17_channels": ((1, 4, 1, 2, 17), [(2, 3, 0)], 6),
    "71_channels": ((1, 3, 2, 1, 71), [(3, 2, 0)], 6),
    "overlapping_levels": ((1, 9, 1, 3, 2), [(2, 3, 1), (3, 3, 0), (2, 3, 1)], 10),
    "gaps_and_reordered_levels": ((1, 5, 1, 2, 3), [(2, 2, 9), (1, 3, 2)], 15),
    "levels_without_pixels": ((1, 5, 2, 2, 3), [(0, 3, 0), (2, 2, 0), (3, 0, 4), (0, 0, 1)], 4),
    "no_keys": ((1, 3, 1, 2, 3), [(0, 3, 0)], 0),
    "no_channels": ((1, 3, 2, 2, 0), [(2, 2, 0)], 4),
    "no_queries": ((1, 0, 2, 2, 3), [(2, 2, 0)], 4),
    "no_batch": ((0, 3, 2, 2, 3), [(2, 2, 0)], 4),
    "no_heads": ((1, 3, 0, 2, 3), [(2, 2, 0)], 4),
    "no_levels": ((1, 3, 2, 2, 3), [], 4),
    "no_points": ((1, 3, 2, 0, 3), [(2, 2, 0)], 4),
}


@pytest.mark.parametrize("query_block", [4, reference.QUERY_BLOCK])
@pytest.mark.parametrize("odd", [0.0, 0.03])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", SHAPES)
def test_bits_of_a_scalar_transcription(name, dtype, odd, query_block, monkeypatch):
    monkeypatch.setattr(reference, "QUERY_BLOCK", query_block)
    shape, levels, num_keys = SHAPES[name]
    for seed in range(3):
        rng = np.random.default_rng([seed, *name.encode()])
        value, locations, weights, grad_output = random_case(rng, dtype, shape, levels, num_keys, odd)
        table = np.array(levels, np.int64).reshape(-1, 3)
        inputs = (value, table[:, :2], table[:, 2], locations, weights)
        with np.errstate(all="raise"):
            results = reference.forward(*inputs), *reference.backward(*inputs, grad_output)
        with np.errstate(all="ignore"):
            expected = transcribe(value, levels, locations, weights, grad_output, query_block)
        for result, right in zip(results, expected, strict=True):
            assert_same_bits(result, right)


# ---- rules one by one -----------------------------------------------------------------------------------


def pixel_row(values, dtype=np.float32):
    """A map of one row and one channel, as a value array."""
    return np.array(values, dtype).reshape(1, -1, 1, 1)


def one_sample(x, y=0.5, dtype=np.float32):
    return np.array([x, y], dtype).reshape(1, 1, 1, 1, 1, 2)


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def test_positions_are_exact():
    # In float32, 0.35 * 10 rounds to 3.5, the centre of pixel 3. Exactly it lies left of it.
    width = 10
    x = np.float32(0.35)
    assert x * np.float32(width) == 3.5
    dx = np.float32(float(Fraction(float(x)) * width - Fraction(1, 2) - 2))
    assert 0 < dx < 1
    inputs = (pixel_row([0, 0, 0, 5, 105, 0, 0, 0, 0, 0]), [(1, width)], None, one_sample(x))
    gradients = reference.backward(*inputs, ones(1, 1, 1, 1, 1), ones(1, 1, 1))
    assert gradients.sampling_locations[..., 0].item() == 50.0
    assert gradients.value.ravel().tolist() == [0, 0, 1 - dx, dx, 0, 0, 0, 0, 0, 0]


def test_sizes_that_multiply_are_rounded_once():
    # Half a pixel left of the first pixel the derivative is 1 per pixel.
    width = 2**24 + 3
    value = np.broadcast_to(np.float32(1), (1, width, 1, 1))
    inputs = (value, [(1, width)], None, one_sample(0), ones(1, 1, 1, 1, 1), ones(1, 1, 1))
    gradients = reference.backward(*inputs, wrt=("sampling_locations",))
    assert gradients.sampling_locations[..., 0].item() == 2**24 + 4


@pytest.mark.parametrize("x", [np.nan, np.inf, -np.inf, 3e38, -0.25, 1.25])
def test_what_does_not_count_is_plus_zero_whatever_else_is_nan(x):
    nan = np.float32(np.nan)
    value, weights = np.full((1, 2, 1, 3), nan), np.full((1, 1, 1, 1, 1), nan)
    inputs = (value, [(1, 2)], None, one_sample(x), weights)
    gradients = reference.backward(*inputs, np.full((1, 1, 3), nan))
    for result in (reference.forward(*inputs), *gradients):
        assert is_plus_zero(result).all()


def test_sums_start_from_plus_zero():
    # Every term below is -0.
    inputs = (pixel_row([-0.0, -0.0]), [(1, 2)], None, one_sample(0.25), ones(1, 1, 1, 1, 1))
    assert is_plus_zero(reference.forward(*inputs)).all()
    gradients = reference.backward(*inputs, -0.0 * ones(1, 1, 1))
    assert is_plus_zero(gradients.value).all()
    assert is_plus_zero(gradients.attention_weights).all()


def test_corners_outside_take_no_part():
    # Left of the first pixel: an infinite gradient times the outer corner's weight goes nowhere.
    inputs = (pixel_row([2, np.nan]), [(1, 2)], None, one_sample(0.125), ones(1, 1, 1, 1, 1))
    assert reference.forward(*inputs).item() == 1.5
    assert reference.backward(*inputs, 4 * ones(1, 1, 1)).value.ravel().tolist() == [3, 0]


def test_query_blocks():
    assert reference.query_blocks(0) == []
    assert reference.query_blocks(1) == [(0, 1)]
    assert reference.query_blocks(16384) == [(0, 16384)]
    assert reference.query_blocks(16385) == [(0, 8192), (8192, 16385)]
    for num_queries in (16385, 22223, 32768, 32769, 100_003):
        blocks = reference.query_blocks(num_queries)
        sizes = [end - begin for begin, end in blocks]
        assert [begin for begin, _ in blocks] + [num_queries] == [0] + [end for _, end in blocks]
        assert max(sizes) <= 16384
        assert max(sizes) - min(sizes) <= 1
        assert len(blocks) == -(-num_queries // 16384)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_blocks_are_summed_apart_then_in_order(dtype):
    num_queries = 40000
    grad_output = np.random.default_rng(5).standard_normal((1, num_queries, 1)).astype(dtype)
    gradients = reference.backward(
        ones(1, 1, 1, 1, dtype=dtype),
        [(1, 1)],
        None,
        np.full((1, num_queries, 1, 1, 1, 2), 0.5, dtype),
        ones(1, num_queries, 1, 1, 1, dtype=dtype),
        grad_output,
        wrt=("value",),
    )
    # accumulate adds from left to right
    parts = np.split(grad_output.ravel(), [13333, 26666])
    first, second, third = (np.add.accumulate(part)[-1] for part in parts)
    assert gradients.value.item() == (first + second) + third
    assert gradients.value.item() != np.add.accumulate(grad_output.ravel())[-1]


def test_lanes():
    assert reference.lanes(np.float32) == 16
    assert reference.lanes(np.float64) == 8


# ---- dtypes, layouts, options ---------------------------------------------------------------------------


def sample_call(dtype=np.float32):
    """A call with random numbers that are exact in every dtype from float16 on."""
    levels = [(2, 3, 0), (4, 2, 6)]
    arrays = random_case(np.random.default_rng(11), np.float16, (2, 6, 2, 2, 5), levels, 14)
    value, locations, weights, grad_output = (array.astype(dtype) for array in arrays)
    return [value, [level[:2] for level in levels], None, locations, weights, grad_output]


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_narrow_inputs_are_computed_in_float32(name):
    dtype = named_dtype(name)
    narrow = sample_call(dtype)
    wide = [array.astype(np.float32) if i in (0, 3, 4, 5) else array for i, array in enumerate(narrow)]
    assert_same_bits(reference.forward(*narrow[:5]), reference.round_to(reference.forward(*wide[:5]), dtype))
    for gradient, expected in zip(reference.backward(*narrow), reference.backward(*wide), strict=True):
        assert_same_bits(gradient, reference.round_to(expected, dtype))


@pytest.mark.parametrize("grad_output_dtype", ["float32", "float64"])
def test_mixed_dtypes_round_once(grad_output_dtype):
    bfloat16 = named_dtype("bfloat16")
    call = sample_call()
    dtypes = {0: np.dtype(np.float16), 3: np.dtype(np.float32), 4: bfloat16, 5: np.dtype(grad_output_dtype)}
    mixed = list(call)
    for place, dtype in dtypes.items():
        mixed[place] = call[place].astype(dtype)
    widened = [array.astype(grad_output_dtype) if i in dtypes else array for i, array in enumerate(mixed)]

    gradients = reference.backward(*mixed)
    wide_gradients = reference.backward(*widened)
    for gradient, wide, place in zip(gradients, wide_gradients, (0, 3, 4), strict=True):
        assert wide.dtype == grad_output_dtype
        assert_same_bits(gradient, reference.round_to(wide, dtypes[place]))
    # grad_output has no say in forward
    narrow = [array.astype(np.float32) if i in dtypes else array for i, array in enumerate(mixed)]
    expected = reference.round_to(reference.forward(*narrow[:5]), np.float16)
    assert_same_bits(reference.forward(*mixed[:5]), expected)


@pytest.mark.parametrize("place", [0, 3, 4])
def test_one_float64_input_makes_all_arithmetic_float64(place):
    call = sample_call()
    wide = [array.astype(np.float64) if i in (0, 3, 4, 5) else array for i, array in enumerate(call)]
    mixed = list(call)
    mixed[place] = wide[place]
    expected = reference.forward(*wide[:5])
    assert_same_bits(reference.forward(*mixed[:5]), reference.round_to(expected, mixed[0].dtype))
    expected = reference.backward(*wide)
    for gradient, right, owner in zip(reference.backward(*mixed), expected, (0, 3, 4), strict=True):
        assert_same_bits(gradient, reference.round_to(right, mixed[owner].dtype))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_byte_order_and_layout_change_no_bit(dtype):
    call = sample_call(dtype)
    output, gradients = reference.forward(*call[:5]), reference.backward(*call)
    swapped = np.dtype(dtype).newbyteorder()
    odd = [
        np.asfortranarray(array.astype(swapped))[..., ::-1][..., ::-1] if i in (0, 3, 4, 5) else array
        for i, array in enumerate(call)
    ]
    for i in (0, 3, 4, 5):
        odd[i].flags.writeable = False
    results = reference.forward(*odd[:5]), *reference.backward(*odd)
    for result, expected in zip(results, (output, *gradients), strict=True):
        assert result.dtype == swapped
        assert_same_bits(result.astype(dtype), expected)


def test_bfloat16_in_foreign_byte_order():
    bfloat16 = named_dtype("bfloat16")
    numbers = np.array([1, -2.5, 1e-40, np.inf, np.nan, 3.14159])
    native = reference.round_to(numbers, bfloat16)
    swapped = reference.round_to(numbers, bfloat16.newbyteorder())
    assert_same_bits(swapped.view(np.uint16).byteswap(), native.view(np.uint16))


def test_coordinate_order():
    call = sample_call()
    flipped = list(call)
    flipped[3] = call[3][..., ::-1]
    expected = reference.backward(*call)
    assert_same_bits(reference.forward(*flipped[:5], coordinate_order="yx"), reference.forward(*call[:5]))
    gradients = reference.backward(*flipped, coordinate_order="yx")
    assert_same_bits(gradients.value, expected.value)
    assert_same_bits(gradients.attention_weights, expected.attention_weights)
    assert_same_bits(gradients.sampling_locations, expected.sampling_locations[..., ::-1])
    assert gradients.sampling_locations.flags.c_contiguous


@pytest.mark.parametrize("wrt", [(), *((name,) for name in ALL), ("attention_weights", "value"), ALL])
def test_wrt_changes_no_bit(wrt):
    call = sample_call()
    for name, gradient, expected in zip(
        ALL, reference.backward(*call, wrt=wrt), reference.backward(*call), strict=True
    ):
        if name in wrt:
            assert_same_bits(gradient, expected)
        else:
            assert gradient is None


def test_no_level_start_index_means_packed():
    call = sample_call()
    started = list(call)
    started[2] = [0, 6]
    assert_same_bits(reference.forward(*call[:5]), reference.forward(*started[:5]))


def test_inputs_are_not_modified():
    call = sample_call()
    before = [array.copy() if i in (0, 3, 4, 5) else array for i, array in enumerate(call)]
    reference.forward(*call[:5])
    reference.backward(*call)
    for i in (0, 3, 4, 5):
        assert_same_bits(call[i], before[i])


# ---- gradients are derivatives --------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 3, 4])
def test_finite_differences(place):
    rng = np.random.default_rng(3)
    levels = [(3, 4), (2, 5)]
    sizes = np.array([(width, height) for height, width in levels]).reshape(1, 1, 1, -1, 1, 2)
    # well inside a cell, where the output is linear along every axis; some cells straddle the border
    cells = rng.integers(-1, sizes, (1, 3, 2, 2, 2, 2)) + rng.uniform(0.2, 0.8, (1, 3, 2, 2, 2, 2))
    call = [
        rng.standard_normal((1, 22, 2, 3)),
        levels,
        None,
        (cells + 0.5) / sizes,
        rng.standard_normal((1, 3, 2, 2, 2)),
    ]
    grad_output = rng.standard_normal((1, 3, 6))
    gradient = reference.backward(*call, grad_output)[{0: 0, 3: 1, 4: 2}[place]]
    step = 1e-3
    for index in np.ndindex(call[place].shape):
        losses = []
        for sign in (1, -1):
            moved = list(call)
            moved[place] = call[place].copy()
            moved[place][index] += sign * step
            losses.append((reference.forward(*moved) * grad_output).sum())
        assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(gradient[index], rel=1e-9, abs=1e-9)


# ---- rounding -------------------------------------------------------------------------------------------

# bits of the significand, smallest and largest exponent of a normal number
FORMATS = {"float16": (11, -14, 15), "bfloat16": (8, -126, 127), "float32": (24, -126, 127)}


def nearest_even(number, name):
    """Round a finite float to a format in exact arithmetic."""
    precision, smallest, largest = FORMATS[name]
    exact = Fraction(number)
    exponent = max(np.frexp(number)[1].item() - 1, smallest)
    unit = Fraction(2) ** (exponent - precision + 1)
    rounded = round(exact / unit) * unit  # Fraction rounds half to even
    if abs(rounded) >= Fraction(2) ** (largest + 1):
        return np.copysign(np.inf, number)
    return np.copysign(float(rounded), number)


def rounding_traps(name):
    """Numbers of a format, the midpoints between them, and what lies just beside both, in float64."""
    precision, smallest, largest = FORMATS[name]
    rng = np.random.default_rng(7)
    significands = np.unique(
        [*range(9), *range(2**precision - 8, 2**precision), *rng.integers(0, 2**precision, 30)]
    )
    exponents = np.unique([*range(smallest, smallest + 4), -1, 0, 1, *range(largest - 3, largest + 2)])
    units = 2.0 ** (exponents - precision + 1)
    numbers = np.concatenate([units[:, None] * (significands + part) for part in (0, 0.25, 0.5, 0.75)], None)
    nudges = [0, 2.0**-52, 2.0**-45, 2.0**-30, 2.0**-24, 2.0**-23]
    beside = np.concatenate([numbers * (1 + sign * nudge) for nudge in nudges for sign in (1, -1)])
    smallest_numbers = [0.0, 5e-324, 1e-310, 1e-46, 1e-45, 2.0**-150, 2.0**-149, 2.0**-134, 2.0**-133, 1e308]
    positive = np.concatenate([beside, smallest_numbers])
    return np.concatenate([positive, -positive])


@pytest.mark.parametrize("source", [np.float32, np.float64])
@pytest.mark.parametrize("name", FORMATS)
def test_rounding_is_exact(name, source):
    with np.errstate(all="ignore"):
        numbers = rounding_traps(name).astype(source)
    numbers = numbers[np.isfinite(numbers)]
    with np.errstate(all="raise"):
        rounded = reference.round_to(numbers, named_dtype(name))
    assert rounded.dtype == named_dtype(name)
    expected = np.array([nearest_even(float(number), name) for number in numbers])
    with np.errstate(all="ignore"):
        assert_same_bits(rounded.astype(np.float64), expected)


def test_rounding_traps_catch_double_rounding():
    numbers = rounding_traps("bfloat16")
    with np.errstate(all="ignore"):
        twice = reference.round_to(numbers.astype(np.float32), named_dtype("bfloat16"))
        assert (twice != reference.round_to(numbers, named_dtype("bfloat16"))).any()


@pytest.mark.parametrize("source", [np.float32, np.float64])
@pytest.mark.parametrize("name", FORMATS)
def test_rounding_of_what_is_not_finite(name, source):
    unsigned = np.dtype(f"u{np.dtype(source).itemsize}")
    ones, infinity = np.iinfo(unsigned).max, int(np.array(np.inf, source).view(unsigned))
    nans = np.array([infinity + 1, ones // 2, ones], unsigned).view(source)
    assert np.isnan(nans).all()
    dtype = named_dtype(name)
    with np.errstate(all="raise"):
        assert np.isnan(reference.round_to(nans, dtype)).all()
        infinities = reference.round_to(np.array([np.inf, -np.inf], source), dtype)
    assert infinities.astype(np.float64).tolist() == [np.inf, -np.inf]


def test_rounding_gives_a_new_array():
    array = np.ones(3, np.float32)
    assert not np.shares_memory(array, reference.round_to(array, np.float32))
