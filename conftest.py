"""Doctests of the JAX face are collected only where JAX is installed."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("jax") else ["gc_dpr/cachex.py"]
