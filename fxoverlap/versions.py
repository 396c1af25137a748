"""The torch releases that `compat` was checked on.

Nothing else of the package is imported here, so that the check comes before imports that another release may not bear.
"""

import re

SUPPORTED_TORCH = ((2, 11), (2, 14))


def check_torch_version(version: str) -> None:
    """Raise ImportError unless `version` is one of the torch releases that fxoverlap was checked on."""
    match = re.match(r"(\d+)\.(\d+)", version)
    found = (int(match[1]), int(match[2])) if match else (0, 0)
    low, high = SUPPORTED_TORCH
    if not low <= found <= high:
        raise ImportError(
            f"fxoverlap needs torch {low[0]}.{low[1]} to {high[0]}.{high[1]}, found {version}. "
            f"Install a supported release, for example `pip install torch=={high[0]}.{high[1]}.*`."
        )
