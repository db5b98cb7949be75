"""The routes: one file per way a gradient travels.

``base.py`` is the contract for code that moves bytes, ``catalogue.py`` lists the routes as the planner sees them.
:func:`register` adds a route; CONTRIBUTING.md shows an example.
"""

from poseidon.routes.catalogue import register, standard_routes, unregister

__all__ = ["register", "standard_routes", "unregister"]
