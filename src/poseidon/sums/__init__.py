"""Sums of whole gradients: the parameter server that the route ``sharded`` goes through.

What decides is pure: ``chunks`` cuts a bucket into chunks with owners, ``slots`` numbers buckets and says how urgent
each is, ``shard`` adds parts in rank order, ``compact`` lays a chunk out in fewer bits. ``service`` ties a shard to a
transport.
"""
