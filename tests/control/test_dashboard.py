"""The Grafana dashboard names metrics that a running cache exports."""

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.control.conftest import TOKENS
from tiercache import TierCache
from tiercache.control.families import figures_of
from tiercache.control.metrics import exposition

DASHBOARD = Path(__file__).parents[2] / "examples" / "observability" / "dashboard.json"


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def names_in(panel: dict[str, Any]) -> set[str]:
    """Of the metrics that a panel's expressions name."""
    expressions = " ".join(target["expr"] for target in panel["targets"])
    return set(re.findall(r"\b(?:vllm:|tiercache_)\w+", expressions))


async def test_every_metric_of_a_panel_is_exported_by_a_running_cache(cache: TierCache) -> None:
    async with cache.get(cache.keys(TOKENS)[0]) as lease:
        assert lease is not None
    text = exposition({"c.sock": figures_of(cache)}).decode()
    exported = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    for panel in panels():
        if not panel["title"].endswith("(vLLM)"):
            assert names_in(panel), panel["title"]
            assert names_in(panel) <= exported, panel["title"]
