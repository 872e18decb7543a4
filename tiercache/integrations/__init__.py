"""Engines that use the cache. Nothing here is imported by the rest."""
