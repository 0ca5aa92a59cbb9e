"""A process of its own that loads a model, generates, and reports: memory can only be measured, and capped, alone.

argv[1]: JSON {"model", "options", "prompt": ids, "max_tokens"}, and perhaps "cgroup": a cgroup.procs to enter first.
Prints JSON {"token_ids", "stats", "budget": {"total_bytes", "booked_bytes"}}, or {"error", "message"}.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

job = json.loads(sys.argv[1])
if "cgroup" in job:
    Path(job["cgroup"]).write_text(str(os.getpid()))

from colibri_offload import ColibriError, Engine  # noqa: E402  in the cgroup from the first large allocation on


def main() -> dict[str, Any]:
    try:
        with Engine.load(job["model"], **job["options"]) as engine:
            out = engine.generate(job["prompt"], max_tokens=job["max_tokens"], ignore_eos=True)
            budget = engine.runtime.budget
            booked = {"total_bytes": budget.total_bytes, "booked_bytes": budget.total_bytes - budget.remaining}
    except ColibriError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"token_ids": out.token_ids, "stats": asdict(out.stats), "budget": booked}


print(json.dumps(main()))
