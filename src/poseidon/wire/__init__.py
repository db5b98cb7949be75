"""Step 4 of a gradient's journey: addressed messages between workers, urgent ones first.

``message`` says what a frame looks like, ``transport`` what a route or server may ask of the wire; ``zeromq`` moves
the bytes between machines and ``memory`` between objects of one test.
"""
