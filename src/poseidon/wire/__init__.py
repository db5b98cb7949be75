"""Step 4 of a gradient's journey: addressed messages between workers, urgent ones first.

``message`` defines a frame, ``transport`` what routes and servers may ask of the wire. ``tcp`` carries the bytes
between machines, ``memory`` between the objects of one test.
"""
