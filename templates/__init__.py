"""Jinja templates of Triton kernels, specialised on geometry when they are rendered.

Each `<op>.py.jinja` here is one kernel with holes for validated integers and enumerations, listed
and explained in its header; `common/` holds what they include. No lowering binds them to a graph
yet: ops run through their references, eagerly or compiled by Inductor.
"""

if __name__ == "templates":
    raise ImportError("import dflash_graph.templates")
