"""Predictors: which chunks will be needed, how probably, and when.

Pure functions of what they were told, with the time passed in: the same calls give the same predictions, in a live cache
and in a replay. A prediction costs nothing by itself; `tiercache.core.prefetch` decides what is spent on it.
"""

from __future__ import annotations

from tiercache.core.prediction.base import Prediction
from tiercache.core.prediction.gaps import Gaps
from tiercache.core.prediction.hints import Hints
from tiercache.core.prediction.sessions import Sessions
from tiercache.core.prediction.workflows import Workflows

__all__ = ["Gaps", "Hints", "Prediction", "Sessions", "Workflows"]
