"""Read the configuration: tiercache's own keys and LMCache's, from YAML, the environment and overrides.

`Config.load` reads and checks; `explain` tells where each value came from.
"""

from tiercache.config.explanation import Explanation, explain
from tiercache.config.loading import Config

__all__ = ["Config", "Explanation", "explain"]
