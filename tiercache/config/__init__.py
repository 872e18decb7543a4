"""Configuration: tiercache's own keys and LMCache's, from YAML, the environment and overrides.

`Config.load` reads and checks; `explain` says what the result means and where each value came from.
"""

from tiercache.config.schema import Config

__all__ = ["Config"]
