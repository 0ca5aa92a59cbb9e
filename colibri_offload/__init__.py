"""colibri-offload: run Mixture-of-Experts language models larger than RAM or VRAM.

The names below are imported on first use, so that the lower packages (jit, storage, scheduler) can be imported without
the engine.
"""

from importlib import import_module
from typing import Any

_EXPORTS = {
    "Engine": "colibri_offload.engine",
    "Sampling": "colibri_offload.text.sampling",
    "ColibriError": "colibri_offload.errors",
}
__all__ = ["ColibriError", "Engine", "Sampling", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'colibri_offload' has no attribute {name!r}")
