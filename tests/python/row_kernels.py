"""What selects starwire's kernels for rows, and the numbers that these and TensorFlow's are compared with."""

from cluster import one, tf

LABEL = "starwire"  # selects our kernel of an operation


def label(labelled):
    return {"_kernel": one().AttrValue(s=LABEL.encode())} if labelled else {}


def unusual(rng, shape, dtype, positive=False):
    """Numbers of any size, zeros of both signs, denormals, infinities, NaN."""
    import numpy as np

    info = tf.as_dtype(dtype)
    kind = np.float64 if dtype == "float64" else np.float32
    exponents = rng.integers(-30, 30, shape) if info.size > 2 else rng.integers(-6, 6, shape)
    values = rng.standard_normal(shape).astype(kind) * kind(2.0) ** exponents
    tiny = np.finfo(kind).tiny
    special = np.array([0.0, -0.0, np.inf, -np.inf, tiny / 4, -tiny / 8, np.finfo(kind).max, np.nan], kind)
    values = np.where(rng.random(shape) < 0.03, special[rng.integers(0, len(special), shape)], values).astype(kind)
    return (np.abs(values) if positive else values).astype(info.as_numpy_dtype)
