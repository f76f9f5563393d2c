"""Values of every dtype, and their digests."""

import hashlib

from cluster import tf

DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "half", "bfloat16", "float32", "float64", "complex64", "complex128", "qint8", "quint8",
    "qint16", "quint16", "qint32", "string", "float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2fnuz", "int4", "uint4", "int2", "uint2",
)  # fmt: skip


def shapes_for(itemsize):
    edge = 8192 // itemsize
    return [
        (), (0,), (0, 3), (3, 0, 2), (1,), (7,), (1000,), (2, 3, 2, 1, 4), (edge - 1,), (edge,), (edge + 1,), (2, edge // 2 + 1), (5 * edge + 3,), ((1 << 20) // itemsize,),
    ]  # fmt: skip


def random_array(dtype, shape, rng):
    """Any bit pattern the type allows (NaNs with payloads, denormals, -0.0)."""
    import numpy as np

    np_dtype = np.dtype(dtype.as_numpy_dtype)
    count = int(np.prod(shape, dtype=np.int64))
    if dtype == tf.bool:
        return (rng.integers(0, 2, count) > 0).reshape(shape)
    if dtype.name in ("int4", "uint4", "int2", "uint2"):
        bits = int(dtype.name[-1])
        low = 0 if dtype.name[0] == "u" else -(1 << (bits - 1))
        return rng.integers(low, low + (1 << bits), count).astype(np_dtype).reshape(shape)
    raw = rng.integers(0, 256, count * np_dtype.itemsize, dtype=np.uint8)
    return np.frombuffer(raw.tobytes(), dtype=np_dtype).reshape(shape)


def random_strings(shape, rng, longest):
    import numpy as np

    count = int(np.prod(shape, dtype=np.int64))
    out = np.empty(count, dtype=object)
    for i in range(count):
        out[i] = rng.bytes(int(rng.integers(0, longest + 1)))
    return out.reshape(shape)


def inputs_for(dtype, seed):
    import numpy as np

    rng = np.random.default_rng(seed)
    if dtype == tf.string:
        long = np.empty((2,), dtype=object)
        long[:] = [rng.bytes(8192), rng.bytes(3_000_000)]
        small = [random_strings(shape, rng, longest) for shape, longest in (((), 10), ((0,), 1), ((3, 0), 1), ((4,), 0), ((7,), 24), ((2, 3, 2), 300), ((20000,), 20), ((50,), 9000))]
        return [*small, long]
    np_dtype = np.dtype(dtype.as_numpy_dtype)
    shapes = shapes_for(np_dtype.itemsize)
    if dtype in (tf.float32, tf.uint8):
        shapes.append(((10 << 20) // np_dtype.itemsize,))
    return [random_array(dtype, shape, rng) for shape in shapes]


def digest(value):
    """Represents a value in a small form that two processes can compare bit by bit."""
    import numpy as np

    value = np.asarray(value, dtype=object if isinstance(value, bytes) else None)
    if value.dtype.fields:  # quantised types are fed as records of one number and fetched as plain numbers
        value = value.view(value.dtype[0])
    data = b"".join(len(x).to_bytes(8, "little") + x for x in value.ravel().tolist()) if value.dtype == object else np.ascontiguousarray(value).tobytes()
    return (str(value.dtype), value.shape, len(data), hashlib.sha256(data).hexdigest())
