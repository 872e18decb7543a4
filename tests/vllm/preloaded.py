"""Import what an engine imports while it starts: once for all engines, which are forks of the process that imports this."""

import gc
import importlib
import os

from tests.vllm.drive import SETTINGS

os.environ.update(SETTINGS)
for name in (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.gemma3",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.renderers.hf",
    "tiercache.integrations.vllm",
):
    importlib.import_module(name)
assert len(os.listdir("/proc/self/task")) == 1, "a fork would have only the locks of other threads"
gc.collect()
gc.freeze()
