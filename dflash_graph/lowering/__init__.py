"""Lowerings: how the steps of a schedule run. Each binds a schedule to buffers once and allocates
no arena at run time.
"""
