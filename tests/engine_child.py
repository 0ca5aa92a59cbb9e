"""A process of its own that loads a model, generates, and reports: memory can only be measured, and capped, alone.

argv[1]: JSON {"model", "options", "prompt": ids, "max_tokens"}, and perhaps "cgroup": a cgroup.procs to enter first,
or "tightest": true: raise memory_budget by what each refusal advises until the model loads.
Prints JSON {"token_ids", "stats", "budget_bytes", "refusals"}; {"error", "message"} for an error of ours.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

job = json.loads(sys.argv[1])
if "cgroup" in job:
    Path(job["cgroup"]).write_text(str(os.getpid()))

from colibri_offload import ColibriError, Engine  # noqa: E402  in the cgroup from the first large allocation on
from colibri_offload.errors import BudgetError  # noqa: E402

_ADVICE = re.compile(r"give --memory-budget (\d+MiB) or more")


def load_tightest(model: str, options: dict[str, Any]) -> tuple[Engine, list[str]]:
    """The engine under the smallest budget that is accepted, and the refusals on the way."""
    refusals: list[str] = []
    budget = "1MiB"
    while len(refusals) < 20:
        try:
            return Engine.load(model, memory_budget=budget, **options), refusals
        except BudgetError as error:
            refusals.append(str(error))
            advice = _ADVICE.search(str(error))
            if advice is None or advice[1] == budget:
                break
            budget = advice[1]
    raise SystemExit(f"the advice of these refusals leads nowhere: {refusals}")


def main() -> dict[str, Any]:
    refusals: list[str] = []
    try:
        if job.get("tightest"):
            engine, refusals = load_tightest(job["model"], job["options"])
        else:
            engine = Engine.load(job["model"], **job["options"])
        with engine:
            out = engine.generate(job["prompt"], max_tokens=job["max_tokens"], ignore_eos=True)
            budget = engine.runtime.budget.total_bytes
    except ColibriError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"token_ids": out.token_ids, "stats": asdict(out.stats), "budget_bytes": budget, "refusals": refusals}


print(json.dumps(main()))
