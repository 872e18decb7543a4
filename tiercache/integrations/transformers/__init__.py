"""Use tiercache with transformers: load the prefix of a conversation, compute the rest, and store new KV after the answer.

```python
kv = ModelKv(model, chunk_tokens=config.chunk_size)
async with TierCache.open(config, kv.layout) as cache, Generator(cache, kv) as generator:
    answer = await generator.generate(ids, GenerationConfig(max_new_tokens=64), salt=tenant)
```

Programs that call the model themselves use `PrefixCache`: `load` returns a `transformers.Cache`, `store` stores from it.
"""

from tiercache.integrations.needed import needed

with needed("tiercache.integrations.transformers", "torch and transformers 5.19 or newer", "'tiercache[transformers]'"):
    from tiercache.integrations.transformers.generator import Answer, Generator
    from tiercache.integrations.transformers.kv_cache import TieredCache
    from tiercache.integrations.transformers.model_kv import ModelKv
    from tiercache.integrations.transformers.prefix_cache import PrefixCache

__all__ = ["Answer", "Generator", "ModelKv", "PrefixCache", "TieredCache"]
