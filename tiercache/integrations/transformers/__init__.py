"""transformers: the prefix of a conversation comes from tiercache, the rest is computed, and what is new is stored behind
the answer.

```python
kv = ModelKv(model, chunk_tokens=config.chunk_size)
async with TierCache.open(config, kv.layout) as cache, Generator(cache, kv) as generator:
    answer = await generator.generate(ids, GenerationConfig(max_new_tokens=64), salt=tenant)
```

`PrefixCache` alone is for those who call the model themselves: `load` gives a `transformers.Cache`, `store` takes it back.
"""

from tiercache.integrations.needed import needed

with needed("tiercache.integrations.transformers", "torch and transformers 5.19 or newer", "'tiercache[transformers]'"):
    from tiercache.integrations.transformers.generator import Answer, Generator
    from tiercache.integrations.transformers.kv_cache import TieredCache
    from tiercache.integrations.transformers.model_kv import ModelKv
    from tiercache.integrations.transformers.prefix_cache import PrefixCache

__all__ = ["Answer", "Generator", "ModelKv", "PrefixCache", "TieredCache"]
