"""One file per way a gradient travels.

``base.py`` is the contract of what moves bytes, ``catalogue.py`` the list of routes as the planner sees them. Further
routes are added with :func:`register`; CONTRIBUTING.md shows one.
"""

from poseidon.routes.catalogue import register, standard_routes, unregister

__all__ = ["register", "standard_routes", "unregister"]
