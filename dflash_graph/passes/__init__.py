"""Passes: a graph goes in, a new graph or a schedule comes out; nothing is changed in place."""
