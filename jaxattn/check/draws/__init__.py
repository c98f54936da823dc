"""Drawn calls and what loops over numpy answer."""
