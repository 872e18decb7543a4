"""docs/configuration.md, made from the table of keys.

Run `python -m tiercache.config.reference > docs/configuration.md` after a change of the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tiercache.config.foreign import FOREIGN
from tiercache.config.remote_options import ALIASES, COMMON, OPTIONS, Option
from tiercache.config.schema import KEYS, Key

_INTRODUCTION = """\
# Configuration

This page is generated from the table in `tiercache/config/schema.py`; change it there, then run
`python -m tiercache.config.reference > docs/configuration.md`.

tiercache reads LMCache's files and variables unchanged. Sources, the later one wins:

1. the YAML file: the one given, else the one that `TIERCACHE_CONFIG_FILE` names, else `LMCACHE_CONFIG_FILE`;
2. `LMCACHE_<KEY>` in the environment, and `LMCACHE_EXTRA_CONFIG`, a JSON object of keys;
3. `TIERCACHE_<KEY>` and `TIERCACHE_EXTRA_CONFIG`;
4. overrides: `Config.load(overrides=...)`, vLLM's `kv_connector_extra_config`, what stands beside
   `"type": "TierCacheTier"` in vLLM's `secondary_tiers` (`config_file` names the YAML file there), or SGLang's
   `--hicache-storage-backend-extra-config`. A key may begin with `tiercache.` or `lmcache.`.

Keys marked *extra* belong inside `extra_config:` for LMCache; tiercache takes every key there and at the top level.
`extra_config` of several sources is merged key by key. A GB is 1024**3 bytes, as it is in LMCache. Keys marked *ours*
are not LMCache's. An unknown key, a wrong type or a value out of range stops the start, and all problems are reported
together.

`tiercache config explain FILE` shows the effective values, where each came from, and the tiers they make.
"""

_HEADINGS = {
    "": "The cache as a whole",
    "cpu": "CPU tier",
    "shared_memory": "Shared memory tier",
    "disk": "Disk tier",
    "gds": "GDS tier",
    "weka": "Weka tier",
    "hf3fs": "3FS tier",
    "remote": "Remote tiers",
}


def reference() -> str:
    """The page, in Markdown."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield _INTRODUCTION
    for tier, heading in _HEADINGS.items():
        yield f"## {heading}\n"
        yield "| key | value | default | meaning |"
        yield "|---|---|---|---|"
        yield from (_row(key) for key in KEYS.values() if key.tier == tier)
        yield ""
    yield from _remotes()
    yield "## Accepted and not honoured\n"
    yield "LMCache keys that ask for what tiercache does not have. All that are given are named in one warning.\n"
    yield ", ".join(f"`{name}`" for name in sorted(FOREIGN))
    yield "\n`LMCACHE_USE_EXPERIMENTAL` is accepted and ignored.\n"


def _remotes() -> Iterator[str]:
    yield "### Settings of a remote tier\n"
    yield "`remote_storage_plugin.NAME.<setting>` for the tier NAME of `remote_storage_plugins`. What LMCache has in"
    yield "`extra_config` itself counts for all tiers of that type, unless an instance says otherwise. Types of your own"
    yield "come by `module_path` and `class_name`, or by an entry point of the group `tiercache.tiers`.\n"
    for type_name, options in (("", COMMON), *OPTIONS.items()):
        names = ", ".join(f"`{alias}`" for alias, kind in ALIASES.items() if kind == type_name)
        yield f"#### {names or 'Every type'}\n"
        yield "| setting | value | default | meaning | LMCache |"
        yield "|---|---|---|---|---|"
        yield from map(_option_row, options)
        yield ""


def _option_row(option: Option) -> str:
    flat = ", ".join(f"`{name}`" for name in option.flat)
    meaning = option.meaning.replace("|", "\\|")
    return f"| `{option.name}` | {option.kind.expected} | {shown_default(option.default)} | {meaning} | {flat} |"


def _row(key: Key) -> str:
    marks = [word for word, present in (("extra", key.extra), ("ours", key.ours)) if present]
    name = f"`{key.name}`" + "".join(f" *{mark}*" for mark in marks)
    meaning = key.meaning
    if key.aliases:
        meaning += "; also " + ", ".join(f"`{alias}`" for alias in key.aliases)
    if not key.honoured:
        meaning += "; not honoured in this version"
    return f"| {name} | {key.kind.expected} | {shown_default(key.default)} | {meaning} |"


def shown_default(value: Any) -> str:
    if value is None or value in ("", ()):
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    print(reference(), end="")
