"""How long a real model computes: from the zoo, a Python file or a prototxt to a profile for planner and simulator."""
