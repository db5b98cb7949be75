"""Step 4 of a gradient's journey: addressed messages between workers, urgent ones first.

``message`` says what a frame looks like, ``transport`` what a route or server may ask of the wire. ``tcp`` and
``zeromq`` carry the bytes between machines (``open`` chooses), ``memory`` between objects of one test.
"""
