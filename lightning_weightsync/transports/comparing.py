"""Are the bytes at two addresses the same? Asked without a look at what they mean: NaNs are equal to themselves."""

from __future__ import annotations

import ctypes

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def same_bytes(one: int, other: int, nbytes: int) -> bool:
    """Whether as many bytes at two addresses are equal; stops at the first difference."""
    return bool(_libc.memcmp(one, other, nbytes) == 0)
