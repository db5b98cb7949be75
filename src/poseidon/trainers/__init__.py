"""Other people's trainers: a strategy for Lightning, a backend for Ray Train, and torch's own class replaced by name.

Each module needs its library and nothing else of this room does: ``import poseidon.trainers.lightning`` registers
``strategy="poseidon"``, ``poseidon.trainers.ray`` has ``PoseidonConfig``, and ``poseidon.trainers.in_place`` serves
Accelerate, Hugging Face's Trainer and every other program that wraps its model with torch's class.
"""
