"""Integrations with engines. No other part of the package imports them."""
