"""Engines execute the form. Each is one file and one row of ENGINES; none changes the function."""

from jaxattn.engines.select import ENGINES, routes, select

__all__ = ["ENGINES", "routes", "select"]
