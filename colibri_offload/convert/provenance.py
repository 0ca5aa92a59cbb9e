"""Where a store's weights came from, for people and for `inspect`. It names files, never folders of a machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from colibri_offload import __version__
from colibri_offload.checkpoint.base import Checkpoint


def provenance(checkpoint: Checkpoint, quant: str) -> Mapping[str, Any]:
    """Source name, its files' sizes in bytes, quant and tool. The same source and settings give the same value."""
    return {
        "source": checkpoint.path.resolve().name,
        "files": {path.name: path.stat().st_size for path in checkpoint.files},
        "quant": quant,
        "tool": f"colibri-offload {__version__}",
    }


def today() -> str:
    """The date in UTC. SOURCE_DATE_EPOCH replaces the clock, so that a build can be repeated bit for bit.

    Source: https://reproducible-builds.org/specs/source-date-epoch/
    """
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    now = datetime.fromtimestamp(int(epoch), UTC) if epoch.isdecimal() else datetime.now(UTC)
    return now.date().isoformat()
