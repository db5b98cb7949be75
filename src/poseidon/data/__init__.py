"""Data that are dealt to however many workers there are, by their speed if wanted, and that know how far they are."""

from poseidon.data.samplers import ElasticSampler, ElasticStream

__all__ = ["ElasticSampler", "ElasticStream"]
